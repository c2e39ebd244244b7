"""The SQL schema of the catalogue.

The table ``meta`` has the format, the half-life of the scores, and the clock: ``wall_s`` is the host's clock at the
last write, and ``offset_s`` is added to it, so that the clock never goes back. The table ``moves`` has the space that
migrations in progress have reserved. The table ``tiers`` has the identity of each tier's folder, from ``tier.json``.

Triggers update the totals of a tier, so that a query of the totals need not read a million rows. A trigger cannot use
INSERT OR IGNORE for a new row of totals: the conflict clause of the statement that fires a trigger overrides the
clauses in the trigger.
"""

from __future__ import annotations

__all__ = ["CREATE_ROUTES", "FORMAT_VERSION", "SCHEMA"]

# The same number is in the last line of the schema.
FORMAT_VERSION = 1

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE files (
    id INTEGER PRIMARY KEY,
    name BLOB NOT NULL UNIQUE,
    tier TEXT NOT NULL,
    size_bytes INTEGER NOT NULL,
    allocated_bytes INTEGER NOT NULL,
    links INTEGER NOT NULL,
    score REAL NOT NULL,
    accesses INTEGER NOT NULL,
    pinned TEXT
);
CREATE TABLE totals (
    tier TEXT PRIMARY KEY,
    files INTEGER NOT NULL DEFAULT 0,
    size_bytes INTEGER NOT NULL DEFAULT 0,
    allocated_bytes INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE tiers (tier TEXT PRIMARY KEY, identity TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE moves (
    id TEXT PRIMARY KEY,
    name BLOB NOT NULL,
    source TEXT NOT NULL,
    destination TEXT NOT NULL,
    allocated_bytes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TRIGGER file_came AFTER INSERT ON files BEGIN
    INSERT INTO totals (tier) SELECT new.tier WHERE NOT EXISTS (SELECT 1 FROM totals WHERE tier = new.tier);
    UPDATE totals SET files = files + 1, size_bytes = size_bytes + new.size_bytes,
        allocated_bytes = allocated_bytes + new.allocated_bytes WHERE tier = new.tier;
END;
CREATE TRIGGER file_went AFTER DELETE ON files BEGIN
    UPDATE totals SET files = files - 1, size_bytes = size_bytes - old.size_bytes,
        allocated_bytes = allocated_bytes - old.allocated_bytes WHERE tier = old.tier;
END;
CREATE TRIGGER file_changed AFTER UPDATE OF tier, size_bytes, allocated_bytes ON files BEGIN
    UPDATE totals SET files = files - 1, size_bytes = size_bytes - old.size_bytes,
        allocated_bytes = allocated_bytes - old.allocated_bytes WHERE tier = old.tier;
    INSERT INTO totals (tier) SELECT new.tier WHERE NOT EXISTS (SELECT 1 FROM totals WHERE tier = new.tier);
    UPDATE totals SET files = files + 1, size_bytes = size_bytes + new.size_bytes,
        allocated_bytes = allocated_bytes + new.allocated_bytes WHERE tier = new.tier;
END;
INSERT INTO meta VALUES ('format', 1), ('wall_s', 0.0), ('offset_s', 0.0), ('half_life_s', 0.0);
"""

# This table was added later. It is created in older catalogues when they are opened.
CREATE_ROUTES = """
CREATE TABLE IF NOT EXISTS routes (
    tier TEXT PRIMARY KEY, state TEXT NOT NULL, route TEXT NOT NULL, why TEXT NOT NULL, wall_s REAL NOT NULL
) WITHOUT ROWID;
"""
