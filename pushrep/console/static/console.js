// Fetches the page again after each `news` event, and adds Copy buttons to commands.
// Without this script pages are complete, but do not update.
"use strict";

const canCopy = Boolean(navigator.clipboard);

function showButtons() {
  if (canCopy) for (const button of document.querySelectorAll("[data-copy][hidden]")) button.hidden = false;
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  await navigator.clipboard.writeText(button.previousElementSibling.textContent);
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
});

function showStale(is) {
  for (const word of document.querySelectorAll(".stale")) word.hidden = !is;
}

// Idiomorph changes only the elements that differ, so that focus, selection and open elements stay.
async function refresh() {
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("live");
    if (!answer.ok || !fresh) throw new Error(answer.statusText);
    Idiomorph.morph(document.getElementById("live"), fresh.outerHTML);
    showButtons();
    showStale(false);
  } catch {
    showStale(true);
  }
}

showButtons();
if (document.getElementById("live")) {
  const events = new EventSource("/live");
  let isBusy = false;
  events.addEventListener("news", async () => {
    if (isBusy || document.hidden) return;
    isBusy = true;
    await refresh();
    isBusy = false;
  });
  events.onerror = () => showStale(true);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
}
