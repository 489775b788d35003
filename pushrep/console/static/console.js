// Fetches the page again every two seconds, and copies commands. Without it pages are complete, but do not update.
"use strict";

const root = document.documentElement;
root.classList.toggle("can-copy", Boolean(navigator.clipboard));

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  await navigator.clipboard.writeText(button.previousElementSibling.textContent);
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
});

// Makes `old` like `fresh`, and touches only what differs: what has the focus, is selected, scrolled or opened stays.
// An element with an id goes on as the one with that id; others, and texts, go on by their place.
function update(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  if (old.nodeType !== Node.ELEMENT_NODE) { old.data = fresh.data; return; }
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  for (const { name } of [...old.attributes]) if (name !== "open" && !fresh.hasAttribute(name)) old.removeAttribute(name);
  const byId = new Map([...old.children].filter((one) => one.id).map((one) => [one.id, one]));
  let next = old.firstChild;
  for (const one of [...fresh.childNodes]) {
    let same = one.id ? byId.get(one.id) : next;
    if (!same || same.nodeName !== one.nodeName || (same.id ?? "") !== (one.id ?? "")) {
      old.insertBefore(one, next);
      continue;
    }
    if (same === next) next = next.nextSibling; else old.insertBefore(same, next);
    update(same, one);
  }
  while (next) { const gone = next; next = next.nextSibling; gone.remove(); }
}

async function refresh() {
  try {
    // Not location.href: it may hold a name and a password, which fetch refuses.
    const answer = await fetch(location.origin + location.pathname + location.search);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("live");
    if (!answer.ok || !fresh) throw new Error(answer.statusText);
    const focused = document.activeElement;
    update(document.getElementById("live"), fresh);
    if (focused.isConnected) focused.focus({ preventScroll: true }); // a row that moved has lost it
    root.classList.remove("is-stale");
  } catch {
    root.classList.add("is-stale");
  }
}

if (document.getElementById("live")) {
  let isBusy = false;
  const look = async () => {
    if (isBusy || document.hidden) return;
    isBusy = true;
    await refresh();
    isBusy = false;
  };
  setInterval(look, 2000);
  document.addEventListener("visibilitychange", look);
}
