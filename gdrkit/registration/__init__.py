"""Device memory to NIC; the only room that knows those who export memory and those who import it.

Level 3.
"""

from __future__ import annotations

from gdrkit.registration.policy import Registration, RegistrationRoute, register

__all__ = ["Registration", "RegistrationRoute", "register"]
