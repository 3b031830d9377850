"use strict";
const parts = document.querySelectorAll("script.part");
const at = (id) => document.getElementById(id);
const unpacked = new Map();
let items = [], names = [], found = [], shown = 0, everywhere = null, searching = 0;

async function unpack(script) {
  const text = atob(script.textContent), bytes = new Uint8Array(text.length);
  for (let place = 0; place < text.length; place++) bytes[place] = text.charCodeAt(place);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}
async function linesOf(part) {
  if (!unpacked.has(part)) {
    if (unpacked.size > 8) unpacked.delete(unpacked.keys().next().value);
    unpacked.set(part, unpack(parts[part]).then((text) => text.split("\n")));
  }
  return unpacked.get(part);
}
// All text goes through `append`, which makes text of strings, never markup.
function make(tag, kind, ...children) {
  const node = document.createElement(tag);
  if (kind) node.className = kind;
  node.append(...children.filter((child) => child !== null && child !== ""));
  return node;
}
function fold(summary, fill, open = false) {
  const body = make("div", "body"), node = make("details", "", summary, body);
  let filled = false;
  const show = () => { if (node.open && !filled) { filled = true; fill(body); } };
  node.addEventListener("toggle", show);
  node.open = open;
  return node;
}
const mean = (values) => values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
const rewards = (run) => run ? run.rollouts.map((rollout) => rollout.reward).filter((reward) => reward !== null) : [];
const score = (item, run = 0) => mean(rewards(item.runs[run]));
const rollouts = (item) => item.runs.flatMap((run) => run ? run.rollouts : []);
function tag(reward, text) {
  return make("span", "tag " + (reward === null ? "warn" : reward > 0 ? "good" : "bad"), text);
}
const short = (value) => String(Number(value.toPrecision(3)));

function conversation(messages) {
  return messages.map(([role, name, reasoning, content, calls]) => make("div", "message " + role,
    make("div", "role", name ? `${role} · ${name}` : role),
    reasoning && make("pre", "reasoning", reasoning),
    content && make("pre", role === "tool" ? "" : "plain", content),
    ...calls.flatMap(([called, given]) => [make("div", "dim", "calls ", make("b", "", called)), make("pre", "", given)])));
}
function diff(text) {
  const kinds = { "+": "good", "-": "bad", "@": "dim" };
  return make("pre", "", ...text.split("\n").map((line) => make("span", kinds[line[0]] || "", line + "\n")));
}
function verdict(verifier) {
  const rows = Object.entries(verifier.rewards || {}).map(([name, value]) => `${name} ${value}`);
  const about = [verifier.cause && `cause: ${verifier.cause}`, verifier.grading && `graded: ${verifier.grading}`, ...rows,
    verifier.artifacts && `artifacts: ${verifier.artifacts}`].filter(Boolean).join(" · ");
  return fold(make("summary", "", "verifier ", make("span", "dim", about)), (body) => body.append(
    ...(verifier.stdout ? [make("pre", "", verifier.stdout)] : [make("p", "dim", "no output")]),
    ...(verifier.diff ? [make("div", "dim", "diff that was graded"), diff(verifier.diff)] : [])), true);
}
function rollout(one, number, open) {
  const back = one.discarded.filter(([, , edit]) => !edit).length;
  const left = one.unscored ? `left out: ${one.unscored}` : "left out";
  const about = `${one.outcome}: ${one.reason} · ${one.turns} turns, ${one.tool_calls} tool calls` +
    (back ? `, ${back} rolled back` : "") + `, ${one.seconds.toFixed(1)} s`;
  const metrics = Object.entries(one.metrics).map(([name, value]) => `${name} ${value}`).join(" · ");
  return fold(make("summary", "", `rollout ${number} `, tag(one.reward, one.reward === null ? left : `reward ${short(one.reward)}`),
    one.fault ? make("span", "tag warn", `agent fault: ${one.fault}`) : "", " ", make("span", "dim", about)), (body) => body.append(
    ...(metrics ? [make("div", "dim", metrics)] : []),
    ...one.edits.map((line) => make("div", "dim", line)),
    ...(one.traceback ? [make("div", "bad", "Exception in the environment:"), make("pre", "", one.traceback)] : []),
    ...conversation(one.messages),
    ...(one.verifier ? [verdict(one.verifier)] : []),
    ...one.discarded.map(([reason, messages, edit]) => fold(make("summary", "dim", edit ? reason : `rolled back: ${reason}`),
      (inner) => inner.append(...conversation(messages))))), open);
}
async function fillItem(body, item) {
  const columns = await Promise.all(item.runs.map(async (run, number) => {
    const column = make("div", "column", names.length > 1 ? make("h3", "", names[number]) : "");
    if (!run) return make("div", "column", make("p", "dim", `not in ${names[number]}`));
    let count = 0;
    for (const place of run.places) {
      if (!place) { column.append(make("p", "dim", "Not in this page, which would be too large; see the JSONL file.")); continue; }
      const group = JSON.parse((await linesOf(place[0]))[place[1]]);
      if (!column.querySelector("details")) column.append(
        fold(make("summary", "dim", `item ${item.key}`), (inner) => inner.append(make("pre", "", group.item))));
      column.append(
        ...(group.traceback ? [make("div", "bad", "Exception in the environment:"), make("pre", "", group.traceback)] : []),
        ...group.rollouts.map((one) => rollout(one, ++count, count === 1)));
    }
    return column;
  }));
  body.append(make("div", names.length > 1 ? "columns" : "", ...columns));
}
function row(item) {
  const tags = item.runs.flatMap((run, number) => [number ? make("span", "dim", "|") : "", ...(run ? run.rollouts.slice(0, 12)
    .map(({ reward }) => tag(reward, reward === null ? "left out" : short(reward))) : [make("span", "dim", "–")]),
    run && run.rollouts.length > 12 ? make("span", "dim", `… mean ${short(score(item, number) ?? NaN)}`) : ""]);
  const node = fold(make("summary", "", make("span", "dim", item.number), make("span", "text", item.title), ...tags),
    (body) => fillItem(body, item));
  node.className = "group";
  node.addEventListener("toggle", () => node.open && history.replaceState(null, "", `#item-${item.key}`));
  return node;
}
function more() {
  at("list").append(...found.slice(shown, shown + 100).map(row));
  shown = Math.min(found.length, shown + 100);
}

const kinds = {
  full: (item) => rollouts(item).some(({ reward }) => reward !== null && reward >= 1),
  none: (item) => rollouts(item).some(({ reward }) => reward !== null && reward <= 0),
  partial: (item) => rollouts(item).some(({ reward }) => reward > 0 && reward < 1),
  mixed: (item) => new Set(item.runs.flatMap(rewards)).size > 1,
  out: (item) => rollouts(item).some(({ reward }) => reward === null),
  first: (item) => score(item, 0) !== null && score(item, 1) !== null && score(item, 0) > score(item, 1),
  second: (item) => score(item, 0) !== null && score(item, 1) !== null && score(item, 1) > score(item, 0),
};
const most = (name) => (item) => -Math.max(...rollouts(item).map((one) => one[name]), 0);
const orders = { turns: most("turns"), tokens: most("tokens"), seconds: most("seconds"),
  low: (item) => score(item) ?? Infinity, high: (item) => -(score(item) ?? -Infinity),
  difference: (item) => -Math.abs((score(item, 0) ?? 0) - (score(item, 1) ?? 0)) };
function list() {
  const kind = kinds[at("reward").value], ending = at("ending").value, order = orders[at("order").value];
  const fields = [...document.querySelectorAll("select.field")].filter((select) => select.value);
  found = items.filter((item) => (!kind || kind(item))
    && (!ending || rollouts(item).some((one) => one.outcome === ending || one.cause === ending))
    && fields.every((select) => String(item.fields[select.name]) === select.value)
    && (!everywhere || everywhere.has(item)));
  if (order) found.sort((one, other) => order(one) - order(other));
  at("list").replaceChildren();
  shown = 0;
  more();
  at("count").textContent = `${found.length} of ${items.length} items`;
}
// Titles and keys first; then the text of every trajectory, part by part, for as long as the question is the same.
async function search() {
  const wanted = at("search").value.trim().toLowerCase(), mine = ++searching;
  everywhere = null;
  if (!wanted) return list();
  everywhere = new Set(items.filter((item) => `${item.title} ${item.key}`.toLowerCase().includes(wanted)));
  list();
  const written = JSON.stringify(wanted).slice(1, -1), at_part = new Map();
  for (const item of items) for (const run of item.runs) for (const place of run ? run.places : [])
    if (place) at_part.set(place[0], [...(at_part.get(place[0]) || []), [item, place[1]]]);
  for (const [part, places] of at_part) {
    const lines = (await unpack(parts[part])).toLowerCase().split("\n");
    if (mine !== searching) return;
    const before = everywhere.size;
    for (const [item, line] of places) if (lines[line].includes(written)) everywhere.add(item);
    if (everywhere.size > before && before < 100) list();
    at("count").textContent = `${found.length} items so far, searched ${part + 1} of ${parts.length} parts`;
  }
  list();
}
function move(step) {
  const rows = [...document.querySelectorAll("#list > details > summary")];
  const next = rows[Math.max(0, rows.indexOf(document.activeElement) + step)];
  if (next) { next.focus(); next.scrollIntoView({ block: "nearest" }); }
}
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") { at("search").value = ""; at("search").blur(); search(); }
  if (/^(INPUT|SELECT)$/.test(event.target.tagName)) return;
  if (event.key === "/") { event.preventDefault(); at("search").focus(); }
  if (event.key === "j") move(1);
  if (event.key === "k") move(-1);
});
async function begin() {
  const index = JSON.parse(await unpack(at("index")));
  names = index.names;
  items = index.items.map(([key, title, fields, runs], place) => ({ key, title, fields, number: place + 1,
    runs: runs.map((run) => run && { places: run[0], rollouts: run[1].map(([reward, outcome, cause, turns, tokens, seconds]) =>
      ({ reward, outcome, cause, turns, tokens, seconds })) }) }));
  let wait = 0;
  at("search").addEventListener("input", () => { clearTimeout(wait); wait = setTimeout(search, 200); });
  for (const select of document.querySelectorAll("#filters select")) select.addEventListener("change", list);
  new IntersectionObserver((seen) => seen.some((one) => one.isIntersecting) && more()).observe(at("end"));
  const asked = decodeURIComponent(location.hash).replace(/^#item-/, "");
  if (asked && items.some((item) => item.key === asked)) { at("search").value = asked; everywhere = new Set(items.filter((item) => item.key === asked)); }
  list();
  if (asked || items.length === 1) document.querySelector("#list > details")?.setAttribute("open", "");
  document.body.dataset.ready = Math.round(performance.now());
}
begin();
