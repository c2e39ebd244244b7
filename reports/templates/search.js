// Search and filter of the cases. Without scripts the page has no search field, and each folder of cases can be unfolded.
(() => {
  const field = document.getElementById("search"), verdict = document.getElementById("verdict");
  const revealTarget = () => {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    for (let node = target; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
    if (target) target.scrollIntoView();
  };
  addEventListener("hashchange", revealTarget);
  revealTarget();
  if (!field) return;
  const suites = [...document.querySelectorAll("details.suite")];
  const wasOpen = new Map(suites.map(suite => [suite, suite.open]));
  const apply = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean), wanted = verdict.value;
    const isActive = words.length > 0 || wanted !== "";
    let count = 0;
    for (const suite of suites) {
      let matches = 0;
      for (const file of suite.querySelectorAll("tbody")) {
        const name = file.querySelector(".group").textContent.toLowerCase();
        let fileMatches = 0;
        for (const row of file.querySelectorAll("tr[id]")) {
          const text = name + " " + row.textContent.toLowerCase();
          const isMatch = words.every(word => text.includes(word)) && (!wanted || row.querySelector(".state." + wanted));
          row.hidden = !isMatch;
          fileMatches += isMatch ? 1 : 0;
        }
        file.hidden = fileMatches === 0;
        matches += fileMatches;
      }
      suite.hidden = matches === 0;
      suite.open = isActive ? matches > 0 : wasOpen.get(suite);
      count += matches;
    }
    document.getElementById("found").textContent = isActive ? count + (count === 1 ? " case" : " cases") : "";
  };
  field.addEventListener("input", apply);
  verdict.addEventListener("change", apply);
  document.querySelector(".search").hidden = false;
})();
