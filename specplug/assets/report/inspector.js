"use strict";
// The token inspector of report.html. Everything that a model wrote goes in as textContent.
const traces = JSON.parse(document.getElementById("traces").textContent);
const names = {
  accepted: "accepted draft", recovered: "recovered token", bonus: "bonus token", plain: "plain token",
  rejected: "rejected", not_looked_at: "not looked at",
};
const byId = (id) => document.getElementById(id);
let spans = [];

function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

/** Line breaks and spaces at the ends made visible; a token without text gets its number. */
function visible(text, token) {
  if (text === "") return `⟨${token}⟩`;
  return text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length));
}

function probability(value) {
  if (value === null) return "–";
  if (value < 0.001) return "<0.001";
  return value > 0.999 && value < 1 ? ">0.999" : value.toFixed(3);
}

/** The tokens of a trace in order: text, number, origin, and the round and place that they come from. */
function tokensOf(trace) {
  return trace.rounds.flatMap((round, number) => {
    const kept = round.drafts.map((draft, place) => ({ ...draft, number, place, origin: draft.decision }))
      .filter((draft) => draft.origin === "accepted");
    const following = round.following && { ...round.following, number, place: round.drafts.length };
    return following ? [...kept, following] : kept;
  });
}

function showSample(index) {
  const trace = traces[index], tokens = tokensOf(trace), rounds = trace.rounds.length - 1;
  const count = (origin) => tokens.filter((token) => token.origin === origin).length;
  byId("about-sample").textContent =
    `${tokens.length} tokens in ${rounds} rounds and the prompt's pass: ${count("accepted")} accepted drafts, ` +
    `${count("recovered")} recovered, ${count("bonus")} bonus, ${count("plain")} plain; engine ${trace.engine}. ` +
    (trace.same_text ? "The same text as in the timed call." : "Another text than in the timed call, which made other numbers of drafts.");
  byId("prompt").textContent = trace.prompt;
  spans = tokens.map((token, position) => {
    // A token that is a line break needs a mark to stand on.
    const shown = token.text === "" ? visible("", token.token) : token.text.replace(/\n/g, "↵\n");
    const span = element("span", shown, `token ${token.origin}`);
    span.tabIndex = position ? -1 : 0;
    span.dataset.round = token.number;
    span.setAttribute("role", "option");
    span.setAttribute("aria-selected", "false");
    span.setAttribute("aria-label", `${visible(token.text, token.token)}, ${names[token.origin]}, round ${token.number}`);
    span.addEventListener("mouseover", () => select(trace, tokens, position));
    span.addEventListener("focus", () => select(trace, tokens, position));
    return span;
  });
  byId("tokens").replaceChildren(...spans);
  if (spans.length) select(trace, tokens, Math.min(1, spans.length - 1));
}

function select(trace, tokens, position) {
  const chosen = tokens[position];
  spans.forEach((span, k) => {
    span.tabIndex = k === position ? 0 : -1;
    span.setAttribute("aria-selected", k === position);
    span.classList.toggle("here", tokens[k].number === chosen.number);
  });
  const round = trace.rounds[chosen.number];
  const title = chosen.number ? `Round ${chosen.number} of ${trace.rounds.length - 1}` : "The prompt's pass";
  const parts = [element("h3", title)];
  if (chosen.number) {
    const asked = `${round.gamma} ${round.gamma === 1 ? "draft" : "drafts"} asked for, ${round.drafts.length} made`;
    parts.push(element("p", round.reason ? `${asked}. Why so many: ${round.reason}.` : `${asked}.`, "soft"));
  }
  const box = element("div", "", "scroll"), table = element("table"), head = element("tr"), body = element("tbody");
  const thead = element("thead");
  for (const name of ["", "token", "p", "q", "decision"]) head.append(element("th", name));
  thead.append(head);
  const rows = round.drafts.map((draft) => [draft, names[draft.decision].replace(" draft", "")]);
  if (round.following) rows.push([round.following, names[round.following.origin]]);
  rows.forEach(([token, decision], place) => {
    const row = element("tr", "", token.decision === "not_looked_at" ? "skipped" : "");
    row.classList.toggle("now", place === chosen.place);
    const cells = [place + 1, visible(token.text, token.token), probability(token.p), probability(token.q ?? null), decision];
    row.append(...cells.map((cell) => element("td", String(cell))));
    body.append(row);
  });
  table.append(thead, body);
  box.append(table);
  parts.push(box, element("p", "p: the target's probability, q: the draft's, both processed; – where it is not known, " +
    "or the draft was not drawn.", "soft"));
  byId("round").replaceChildren(...parts);
}

function move(event) {
  const now = spans.indexOf(document.activeElement);
  if (now < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
  const round = Number(spans[now].dataset.round), last = spans.length - 1;
  const first = (number) => spans.findIndex((span) => Number(span.dataset.round) === number);
  const after = spans.findIndex((span) => Number(span.dataset.round) > round);
  const before = now > first(round) ? first(round) : first(Math.max(0, Number(spans[Math.max(0, now - 1)].dataset.round)));
  const goal = {
    ArrowRight: Math.min(now + 1, last), ArrowLeft: Math.max(now - 1, 0), Home: 0, End: last,
    ArrowDown: after < 0 ? now : after, ArrowUp: before,
  }[event.key];
  if (goal === undefined) return;
  event.preventDefault();
  spans[goal].focus();
}

if (traces.length) {
  traces.forEach((trace, k) => {
    const option = element("option", `${trace.id} (${trace.category})`);
    option.value = k;
    byId("sample").append(option);
  });
  byId("sample").addEventListener("change", (event) => showSample(Number(event.target.value)));
  byId("tokens").addEventListener("keydown", move);
  addEventListener("beforeprint", () => { document.querySelector("#inspector details").open = true; });
  showSample(0);
}
