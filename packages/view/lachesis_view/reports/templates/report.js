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
const lineOf = async ([part, line]) => JSON.parse((await linesOf(part))[line]);
// Rollouts are markup that was made, and all text in it escaped, by rollout_macros.html.jinja.
function markup(html) {
  const holder = document.createElement("template");
  holder.innerHTML = html;
  return holder.content;
}
// All other text goes through `append`, which makes text of strings, never markup.
function make(tag, kind, ...children) {
  const node = document.createElement(tag);
  if (kind) node.className = kind;
  node.append(...children.filter((child) => child !== null && child !== ""));
  return node;
}
function fold(summary, fill) {
  const body = make("div", "body"), node = make("details", "", summary, body);
  node.addEventListener("toggle", () => fill(body), { once: true });
  return node;
}
const mean = (values) => values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
const rewards = (run) => run ? run.rollouts.map((rollout) => rollout.reward).filter((reward) => reward !== null) : [];
const score = (item, run = 0) => mean(rewards(item.runs[run]));
const rollouts = (item) => item.runs.flatMap((run) => run ? run.rollouts : []);
const short = (value) => String(Number(value.toPrecision(3)));

async function fillItem(body, item) {
  const columns = await Promise.all(item.runs.map(async (run, number) => {
    const column = make("div", "column", names.length > 1 ? make("h3", "", names[number]) : "");
    if (!run) return make("div", "column", make("p", "dim", `not in ${names[number]}`));
    for (const place of run.places) {
      if (!place) { column.append(make("p", "dim", "Not in this page, which would be too large; see the JSONL file.")); continue; }
      const [about, tools, trajectories] = await lineOf(place);
      if (!column.querySelector("details")) column.append(markup(about),
        tools ? fold(make("summary", "dim", "tools"), async (inner) => inner.append(markup(await lineOf(tools)))) : "");
      column.append(markup(trajectories));
    }
    column.querySelector(".rollout")?.setAttribute("open", "");
    return column;
  }));
  body.append(make("div", names.length > 1 ? "columns" : "", ...columns));
  follow();
}
// Open all that the place of the address is in.
function follow() {
  const target = at(location.hash.slice(1));
  for (let box = target; box; box = box.parentElement.closest("details")) box.open = true;
  target?.scrollIntoView();
}
function row(item) {
  const tags = item.runs.flatMap((run, number) => [number ? make("span", "dim", "|") : "", ...(run ? run.rollouts.slice(0, 12)
    .map(({ reward, cause, tone }) => cause === "declined" ? make("span", "tag", "no reward") : reward === null ? make("span", "tag warn", "left out") : make("span", `cell ${tone}`, short(reward))) : [make("span", "dim", "–")]),
    run && run.rollouts.length > 12 ? make("span", "dim", `… mean ${short(score(item, number) ?? NaN)}`) : ""]);
  const node = fold(make("summary", "", make("span", "dim", item.name), make("span", "text", ...item.title.split("\n").map((part, at) => at ? make("span", "own", ` ${part}`) : part)), ...tags),
    (body) => fillItem(body, item));
  node.className = "group";
  node.addEventListener("toggle", () => node.open && !location.hash.startsWith(item.anchor)
    && history.replaceState(null, "", item.anchor));
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
  out: (item) => rollouts(item).some(({ reward, cause }) => reward === null && cause !== "declined"),
  first: (item) => score(item, 0) !== null && score(item, 1) !== null && score(item, 0) > score(item, 1),
  second: (item) => score(item, 0) !== null && score(item, 1) !== null && score(item, 1) > score(item, 0),
};
const most = (name) => (item) => -Math.max(...rollouts(item).map((one) => one[name]), 0);
const orders = { turns: most("turns"), tokens: most("tokens"), seconds: most("seconds"),
  low: (item) => score(item) ?? Infinity, high: (item) => -(score(item) ?? -Infinity),
  difference: (item) => { // what one of the runs lacks comes last
    const [a, b] = [score(item, 0), score(item, 1)];
    return a == null || b == null ? Infinity : -Math.abs(a - b);
  } };
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
  at("count").textContent = `${found.length.toLocaleString("en")} of ${items.length.toLocaleString("en")} items`;
}
// The signs that are escaped in markup, so that every "<" in it begins a tag.
const SIGNS = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&#34;": '"', "&#39;": "'" };
function says(line, wanted) {
  const [about, , trajectories] = JSON.parse(line);
  const text = (about + trajectories).replace(/<[^>]*>/g, "\n").replace(/&[^;]*;/g, (sign) => SIGNS[sign]);
  return text.toLowerCase().includes(wanted);
}
// Titles and keys first; then the text of every trajectory, part by part, for as long as the question is the same.
async function search() {
  const wanted = at("search").value.trim().toLowerCase(), mine = ++searching;
  everywhere = null;
  if (!wanted) return list();
  everywhere = new Set(items.filter((item) => `${item.title} ${item.key}`.toLowerCase().includes(wanted)));
  list();
  const escaped = Object.entries(SIGNS).reduce((text, [escape, sign]) => text.replaceAll(sign, escape), wanted);
  const written = JSON.stringify(escaped).slice(1, -1), at_part = new Map();
  for (const item of items) for (const run of item.runs) for (const place of run ? run.places : [])
    if (place) at_part.set(place[0], [...(at_part.get(place[0]) || []), [item, place[1]]]);
  for (const [part, places] of at_part) {
    const text = await unpack(parts[part]), lines = text.split("\n"), lower = text.toLowerCase().split("\n");
    if (mine !== searching) return;
    const before = everywhere.size;
    for (const [item, line] of places) if (lower[line].includes(written) && says(lines[line], wanted)) everywhere.add(item);
    if (everywhere.size > before && before < 100) list();
    at("count").textContent = `${found.length.toLocaleString("en")} items so far, searched ${part + 1} of ${parts.length} parts`;
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
  items = index.items.map(([key, title, fields, runs, name]) => ({ key, title, fields, name, anchor: `#item-${encodeURIComponent(key)}`,
    runs: runs.map((run) => run && { places: run[0], rollouts: run[1].map(([reward, outcome, cause, turns, tokens, seconds, tone]) =>
      ({ reward, outcome, cause, turns, tokens, seconds, tone })) }) }));
  let wait = 0;
  at("search").addEventListener("input", () => { clearTimeout(wait); wait = setTimeout(search, 200); });
  for (const select of document.querySelectorAll("#filters select")) select.addEventListener("change", list);
  new IntersectionObserver((seen) => seen.some((one) => one.isIntersecting) && more()).observe(at("end"));
  const asked = items.find(({ anchor }) => `${location.hash}/`.startsWith(`${anchor}/`));
  if (asked) { at("search").value = asked.key; everywhere = new Set([asked]); }
  addEventListener("hashchange", follow);
  list();
  if (asked || items.length === 1) document.querySelector("#list > details")?.setAttribute("open", "");
  document.body.dataset.ready = Math.round(performance.now());
}
begin();
