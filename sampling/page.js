"use strict";
// The page of `sample.py --serve`. Each column holds the text of one model: the tokens of the
// prompt, then the written ones, one <span> each. Everything comes from this server.

const $ = id => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens"];
const settings = {};   // what is sent; a slider changes its own key alone
let made = {};         // the settings that the texts were begun with
const columns = [];
let levels = [];       // surprise in nats at which the next colour begins
let shown = null;      // {column, at, pinned} of the open popover; pinned: it does not follow the pointer
let timer = 0;         // of the popover

const percent = p => p >= 0.0995 ? `${(100 * p).toFixed(0)} %` : `${(100 * p).toPrecision(2)} %`;
const quoted = text => `“${text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣")}”`;
const spoken = text => text === " " ? "space" : text === "\n" ? "new line" : text.replaceAll("\n", " new line ");

// ---------------------------------------------------------------- the server

async function ask(path, data, signal) {
  const options = data && { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(data), signal };
  const response = await fetch(path, options);
  if (!response.ok) throw new Error((await response.json().catch(() => ({}))).error ?? `the server answers ${response.status}`);
  return response;
}

async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const part of parts) yield JSON.parse(part);
  }
}

function complain(error) {
  $("error").textContent = error instanceof TypeError ? "the server does not answer: is it still running?" : error.message;
}

// ---------------------------------------------------------------- settings

function setUp(facts) {
  Object.assign(settings, facts.settings);
  for (const key in settings) if (link.has(key)) settings[key] = linked(key);
  const vocabulary = Math.max(...facts.models.map(model => model.vocabulary));
  const most = Math.min(vocabulary, Math.max(200, settings.top_k ?? 0));
  $("top_k").max = most + 1;  // one more: all tokens
  $("max_new_tokens").max = facts.most;
  const start = { ...settings, top_k: settings.top_k && settings.top_k <= most ? settings.top_k : most + 1 };
  start.top_p ??= 1;
  start.min_p ??= 0;
  for (const key of NUMBERS) {
    const input = $(key), output = input.previousElementSibling;
    input.max = Math.max(input.max, start[key]);
    input.min = Math.min(input.min, start[key]);
    input.value = start[key];
    const show = () => {
      const all = key === "top_k" && input.value === input.max;
      output.textContent = all ? "all" : Number(input.value);
      input.setAttribute("aria-valuetext", output.textContent);
      return all ? null : Number(input.value);
    };
    show();
    input.addEventListener("input", () => { settings[key] = show(); });
  }
  $("seed").value = settings.seed;
  $("stop").value = settings.stop;
  $("seed").addEventListener("input", () => { settings.seed = $("seed").valueAsNumber; });
  $("stop").addEventListener("input", () => { settings.stop = $("stop").value; });
  $("prompt").value = link.get("prompt") ?? facts.prompt;

  levels = facts.levels;
  explainSurprise();
}

// ---------------------------------------------------------------- a text as a link

// The text is the same wherever the same models are served, so a link holds what it is made from:
// the prompt, the settings, and in turns0 and turns1 the alternatives chosen in each column: 12:45
// where token 45 was chosen after 12 written ones.
const link = new URLSearchParams(location.hash.slice(1));

function linked(key) {
  const value = link.get(key);
  return key === "stop" ? value : value === "" ? null : Number(value);
}

function address() {
  const parts = new URLSearchParams({ prompt: columns[0].prompt });
  for (const key in made) parts.set(key, made[key] ?? "");  // another command line begins with others
  for (const { number, turns } of columns) if (turns.length) parts.set(`turns${number}`, turns.map(([before, id]) => `${before}:${id}`).join(" "));
  return `#${parts}`;
}

async function share() {
  const mixed = columns.some(column => column.turns.some(([, , same]) => !same));
  if (mixed) return complain(new Error("the settings were changed within a text, and a link holds one group of them: press Write again"));
  history.replaceState(null, "", address());
  const copied = navigator.clipboard?.writeText(location.href).then(() => "the link is copied");
  $("status").textContent = await (copied ?? Promise.reject()).catch(() => "the address of this page is the link");
}

// Write the text of the link again, one chosen alternative after another.
async function replay(column) {
  const turns = (link.get(`turns${column.number}`) ?? "").split(" ").filter(Boolean);
  await write(column);
  for (const turn of turns) {
    const [before, id] = turn.split(":").map(Number), at = column.first + before;
    const choice = column.tokens[at]?.top?.find(([other]) => other === id);
    if (!choice) throw new Error("this link was made with another model");
    await goOn(column, at, choice);
  }
}

// ---------------------------------------------------------------- legend

// The colours of the texts: boxes are [class name, text, share of the strongest colour].
function explain(title, boxes) {
  $("legend").replaceChildren(title, ...boxes.map(([name, text, share = 0]) => {
    const box = document.createElement("span");
    box.className = name;
    box.textContent = text;
    box.style.setProperty("--w", share);
    return box;
  }));
}

function explainSurprise() {
  const colours = [...levels, Infinity].map((limit, i) => [`s${i}`,
    i === 0 ? `below ${limit}` : limit === Infinity ? `${levels[i - 1]} or more` : `${levels[i - 1]}–${limit}`]);
  explain("surprise in nats:", [...colours, ["prompt", "prompt"]]);
}

function explainAttention(most) {
  explain("share of the attention:", [0, 0.5, 1].map(share => ["share", share ? percent(most * share ** 2) : "0 %", share]));
}

// ---------------------------------------------------------------- columns

function addColumn(model, number) {
  const box = $("column").content.cloneNode(true).firstElementChild;
  const find = name => box.querySelector(name);
  const column = { model, number, box, text: find(".text"), tokens: [], active: -1, past: [], turns: [], first: 0, maps: new Map(), prompt: "" };
  find("h2").textContent = model.name;
  find("h2").id = `name-${number}`;
  find(".about").textContent = `${model.heads.length} layers · ${model.vocabulary.toLocaleString("en")} tokens in the vocabulary · context of ${model.context.toLocaleString("en")}`;
  box.setAttribute("aria-labelledby", `name-${number}`);
  column.text.setAttribute("aria-label", `Text of ${model.name}, token by token`);
  column.layer = find(".layer");
  column.head = find(".head");
  column.layer.append(new Option("off", ""), ...model.heads.map((heads, i) => new Option(heads ? `layer ${i}` : `layer ${i}: none`, i)));
  model.heads.forEach((heads, i) => { column.layer.options[i + 1].disabled = !heads; });
  column.layer.addEventListener("change", () => chooseLayer(column));
  column.head.addEventListener("change", () => attend(column));
  find(".back").addEventListener("click", () => undo(column));
  listen(column);
  columns.push(column);
  $("columns").append(box);
}

function addToken(column, token) {
  const at = column.tokens.length, span = document.createElement("span");
  column.tokens.push(token);
  token.span = span;
  span.id = `t${column.number}-${at}`;
  span.dataset.at = at;
  span.role = "option";
  span.ariaSelected = "false";
  draw(token);
  column.text.append(span);
}

function draw(token) {
  const { span, text } = token;
  const level = token.surprise !== undefined ? levels.filter(limit => token.surprise >= limit).length : -1;
  span.className = level < 0 ? "prompt" : `s${level}`;
  span.classList.toggle("newline", text.startsWith("\n"));
  span.classList.toggle("part", text === "");  // a part of the character that follows
  span.textContent = text.replace(/[\x00-\x08\x0b-\x1f\x7f]/g, "�");
  const label = text === "" ? `part of a character, ${token.label}` : spoken(text);
  span.ariaLabel = level >= 0 ? `${label}, ${percent(Math.exp(-token.surprise))}, surprise ${token.surprise.toFixed(1)}` : `${label}, prompt`;
}

function redraw(column, tokens) {
  hide();
  column.text.replaceChildren();
  column.tokens = [];
  column.active = -1;
  column.maps = new Map();
  column.text.removeAttribute("aria-activedescendant");
  tokens.forEach(token => addToken(column, token));
  summarise(column);
}

function summarise(column) {
  const written = column.tokens.filter(token => token.surprise !== undefined);
  const mean = written.reduce((sum, token) => sum + token.surprise, 0) / written.length;
  const speed = column.speed ? ` · ${column.speed.toFixed(0)} tokens/s` : "";
  column.box.querySelector(".facts").textContent = written.length ? `${written.length} tokens · ${mean.toFixed(2)} nats per token${speed}` : "";
  column.box.querySelector("pre").textContent = column.tokens.map(token => token.text).join("");
  column.box.querySelector(".back").disabled = !column.past.length;
}

// ---------------------------------------------------------------- writing

// Write on after the prompt and the tokens `kept`, which this model has written before.
async function write(column, kept = []) {
  column.controller?.abort();
  const controller = column.controller = new AbortController();
  busy();
  let began = 0, count = 0, frame = 0;
  try {
    const data = { ...settings, model: column.number, prompt: column.prompt, kept: kept.map(token => token.id) };
    for await (const line of lines(await ask("write", data, controller.signal))) {
      if (controller.signal.aborted) return;
      if (line.error) throw new Error(line.error);
      if (line.tokens) {
        const first = column.first = line.tokens.length - line.kept;
        redraw(column, line.tokens.map((id, i) => ({ ...kept[i - first], id, text: line.texts[i], label: line.labels[i] })));
        began = performance.now();
      } else if (line.end) {
        const last = column.tokens.at(-1);
        if (line.rest && last) { last.text += line.rest; draw(last); }
      } else {
        addToken(column, line);
        count += 1;
        column.speed = 1000 * count / (performance.now() - began);
        frame ||= requestAnimationFrame(() => { frame = 0; summarise(column); });
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") complain(error);
  } finally {
    if (column.controller === controller) column.controller = null;
    cancelAnimationFrame(frame);
    summarise(column);
    busy();
  }
}

function busy() {
  const writing = columns.filter(column => column.controller).length;
  $("stop-writing").disabled = !writing;
  $("share").disabled = writing || !columns.some(column => column.first < column.tokens.length);
  const done = columns.filter(column => column.tokens.length).map(column => `${column.model.name}: ${column.box.querySelector(".facts").textContent}`);
  $("status").textContent = writing ? "writing …" : done.length ? `done. ${columns.length > 1 ? "" : done[0]}` : "";
}

// Begin anew in all columns, and compare the losses when each is done. work(column) is a promise.
async function all(work) {
  $("error").textContent = "";
  made = { ...settings };
  for (const column of columns) Object.assign(column, { prompt: $("prompt").value, past: [], turns: [] });
  await Promise.all(columns.map(column => work(column).catch(complain)));
  await compare();
}

// The text goes on with another token in place of the one at `at`.
function goOn(column, at, [id, label, p]) {
  const token = column.tokens[at];
  const before = column.tokens.slice(0, at).filter(other => other.top);
  column.past.push({ tokens: column.tokens, turns: [...column.turns] });
  column.turns.push([before.length, id, Object.keys(made).every(key => made[key] === settings[key])]);
  $("error").textContent = "";
  return write(column, [...before, { id, label, text: label, surprise: -Math.log(p), top: token.top }]);
}

function undo(column) {
  column.controller?.abort();
  const { tokens, turns } = column.past.pop();
  column.turns = turns;
  redraw(column, tokens);
  column.text.focus();
  compare();
}

// ---------------------------------------------------------------- losses

const score = async (column, text) => (await ask("score", { model: column.number, text })).json();

// The prompt, coloured by the surprise of its tokens.
async function scorePrompt(column) {
  column.controller?.abort();
  const { pieces, surprise } = await score(column, column.prompt);
  column.speed = 0;
  column.first = pieces.length;  // nothing is written
  redraw(column, pieces.map((text, i) => ({ text, label: text, surprise: surprise[i] })));
  busy();
}

// Of two models, the loss of each on the texts of both.
async function compare() {
  const texts = new Map();  // a text: which one it is
  for (const column of columns) {
    const text = column.tokens.map(token => token.text).join("");
    if (text) texts.set(text, column.first < column.tokens.length ? `by ${column.model.name}` : "the prompt");
  }
  $("losses").hidden = columns.length < 2 || !texts.size || columns.some(column => column.controller);
  if ($("losses").hidden) return;
  const cell = (name, text) => Object.assign(document.createElement(name), { textContent: text });
  const headings = columns.map(column => Object.assign(cell("th", column.model.name), { scope: "col" }));
  $("losses").querySelector("thead tr").replaceChildren(Object.assign(cell("th", "text"), { scope: "col" }), ...headings);
  const rows = [...texts].map(async ([text, name]) => {
    const scores = await Promise.all(columns.map(column => score(column, text).catch(error => ({ error: error.message }))));
    const lowest = Math.min(...scores.map(score => score.bits_per_byte ?? Infinity)), row = document.createElement("tr");
    row.append(Object.assign(cell("th", name), { scope: "row" }), ...scores.map(score => {
      const box = cell("td", score.error ?? `${score.nats_per_token.toFixed(3)} nats per token`);
      if (!score.error) box.append(cell("small", `${score.bits_per_byte.toFixed(3)} bits per byte`));
      box.classList.toggle("lowest", score.bits_per_byte === lowest);
      return box;
    }));
    return row;
  });
  const body = await Promise.all(rows);
  $("losses").querySelector("tbody").replaceChildren(...body);
}

// ---------------------------------------------------------------- the token under the cursor

function listen(column) {
  const { text } = column;
  const at = event => event.target.dataset.at === undefined ? -1 : Number(event.target.dataset.at);
  text.addEventListener("pointerover", event => {
    if (event.pointerType === "touch" || at(event) < 0 || shown?.pinned) return;
    later(() => choose(column, at(event)), shown ? 140 : 60);
  });
  text.addEventListener("pointerleave", leave);
  text.addEventListener("click", event => { if (at(event) >= 0) choose(column, at(event), true); });
  text.addEventListener("focus", () => { if (text.matches(":focus-visible")) choose(column, Math.max(0, column.active), true); });
  text.addEventListener("blur", event => { if (!$("popover").contains(event.relatedTarget)) later(hide, 100); });
  text.addEventListener("keydown", event => {
    const last = column.tokens.length - 1, { active } = column;
    const moves = {
      ArrowLeft: active - 1, ArrowRight: active + 1, Home: 0, End: last,
      ArrowUp: lineFrom(column, -1), ArrowDown: lineFrom(column, 1),
    };
    if (event.key in moves && !event.ctrlKey && !event.altKey) {
      event.preventDefault();
      choose(column, Math.min(last, Math.max(0, moves[event.key])), true);
      column.tokens[column.active]?.span.scrollIntoView({ block: "nearest" });
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      choose(column, Math.max(0, active), true);
      if (shown) ($("alternatives").querySelector("button") ?? $("popover")).focus();
    } else if (event.key === "Escape") hide();
  });
}

function leave() {
  if (shown?.pinned) return;
  later(hide, 300);
}

// The token one line above or below the active one, at about the same place.
function lineFrom(column, step) {
  const { tokens, active } = column;
  const here = tokens[active]?.span.getBoundingClientRect();
  if (!here) return 0;
  let best = active, distance = Infinity, line = null;
  for (let i = active + step; tokens[i]; i += step) {
    const box = tokens[i].span.getClientRects()[0];
    if (!box || Math.abs(box.top - here.top) < 4) continue;
    line ??= box.top;
    if (Math.abs(box.top - line) >= 4) break;
    if (Math.abs(box.left - here.left) < distance) [best, distance] = [i, Math.abs(box.left - here.left)];
  }
  return best;
}

function later(action, wait) {
  clearTimeout(timer);
  timer = setTimeout(action, wait);
}

function choose(column, at, pinned = false) {
  clearTimeout(timer);
  const token = column.tokens[at];
  if (!token) return;
  for (const other of columns) {
    const old = other.tokens[other.active];
    if (old) { old.span.classList.remove("active"); old.span.ariaSelected = "false"; }
    if (other !== column) clearAttention(other);
  }
  column.active = at;
  token.span.classList.add("active");
  token.span.ariaSelected = "true";
  column.text.setAttribute("aria-activedescendant", token.span.id);
  shown = { column, at, pinned };
  showAlternatives(column, at, token);
  attend(column);
}

function showAlternatives(column, at, token) {
  $("popover-title").textContent = quoted(token.text || token.label);
  const facts = token.surprise !== undefined ? `${percent(Math.exp(-token.surprise))} likely at temperature 1, surprise ${token.surprise.toFixed(2)} nats` : "a token of the prompt";
  $("popover-facts").textContent = token.text === "" ? `part of a character; ${facts}` : facts;
  $("attended").textContent = "";
  const top = token.top ?? [];
  $("alternatives").hidden = !top.length;
  const drawn = top.some(([id]) => id === token.id) ? [] : [[token.id, token.label, Math.exp(-token.surprise)]];
  $("alternatives").replaceChildren(...(token.top ? [...top, ...drawn] : []).map(alternative => {
    const [id, label, p] = alternative;
    const item = document.createElement("li"), button = document.createElement("button");
    const name = document.createElement("span"), share = document.createElement("span");
    name.className = "label";
    name.textContent = quoted(label);
    share.textContent = percent(p);
    button.type = "button";
    button.classList.toggle("drawn", id === token.id);
    button.ariaLabel = `${spoken(label)}, ${percent(p)}${id === token.id ? ", written here" : ""}: write on from here`;
    button.style.setProperty("--share", `${100 * p}%`);
    button.append(name, share);
    button.addEventListener("click", () => {
      column.text.focus();
      goOn(column, at, alternative).then(compare);
    });
    item.append(button);
    return item;
  }));
  $("popover").hidden = false;
  place(token.span);
}

// Below the token, touching it, so that the pointer can move in; above it where there is no room.
function place(span) {
  const box = [...span.getClientRects()].at(-1) ?? span.getBoundingClientRect(), popover = $("popover");
  const { offsetWidth: width, offsetHeight: height } = popover;
  const below = box.bottom + height < innerHeight || box.top < height;
  popover.style.left = `${Math.max(8, Math.min(box.left, document.documentElement.clientWidth - width - 8))}px`;
  popover.style.top = `${Math.max(4, below ? Math.min(box.bottom, innerHeight - height - 4) : box.top - height)}px`;
}

function hide() {
  clearTimeout(timer);
  if ($("popover").contains(document.activeElement)) shown?.column.text.focus();
  $("popover").hidden = true;
  if (!shown) return;
  shown.column.tokens[shown.column.active]?.span.classList.remove("active");
  clearAttention(shown.column);
  shown = null;
}

$("popover").addEventListener("pointerenter", () => clearTimeout(timer));
$("popover").addEventListener("pointerleave", leave);
$("popover").addEventListener("focusout", event => {
  if (event.relatedTarget && !$("popover").contains(event.relatedTarget) && event.relatedTarget !== shown?.column.text) hide();
});
$("popover").addEventListener("keydown", event => {
  const buttons = [...$("alternatives").querySelectorAll("button")];
  const i = buttons.indexOf(document.activeElement), { column } = shown;
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    event.preventDefault();
    buttons.at((i + (event.key === "ArrowDown" ? 1 : -1)) % buttons.length)?.focus();
  } else if (event.key === "Escape") {
    column.text.focus();
    hide();
  }
});
addEventListener("scroll", () => { if (shown) place(shown.column.tokens[shown.at].span); }, { passive: true });
addEventListener("resize", hide);

// ---------------------------------------------------------------- attention

function chooseLayer(column) {
  const heads = column.model.heads[column.layer.value] ?? 0, old = column.head.value;
  column.head.disabled = !heads;
  column.head.replaceChildren(...(heads ? [new Option("mean", "mean")] : []), ...Array.from({ length: heads }, (_, i) => new Option(i, i)));
  if ([...column.head.options].some(option => option.value === old)) column.head.value = old;
  attend(column);
}

function clearAttention(column) {
  if (column.text.classList.contains("attending")) explainSurprise();
  column.text.classList.remove("attending");
  column.tokens.forEach(({ span }) => span.style.removeProperty("--w"));
}

const mapKey = column => `${column.layer.value} ${column.active}`;
const wantsMap = column => column.layer.value !== "" && column.tokens[column.active]?.id !== undefined;

function attend(column) {
  if (!wantsMap(column)) return clearAttention(column);
  const found = column.maps.get(mapKey(column));
  if (found) showAttention(column, column.active, found);
  else if (!column.asking) fetchMaps(column);
}

// Of the tokens that a cursor passes while the server computes, only the last is asked for.
async function fetchMaps(column) {
  column.asking = true;
  try {
    while (wantsMap(column) && !column.maps.has(mapKey(column))) {
      const { maps, active: at } = column, key = mapKey(column);
      const tokens = column.tokens.map(token => token.id);
      const response = await ask("attention", { model: column.number, tokens, at, layer: Number(column.layer.value) });
      maps.set(key, await response.json());
      attend(column);
    }
  } catch (error) {
    complain(error);
  } finally {
    column.asking = false;
  }
}

function showAttention(column, at, { start, weights }) {
  if (shown?.column !== column) return;
  const chosen = column.head.value;
  const row = chosen === "mean" ? weights[0].map((_, i) => weights.reduce((sum, head) => sum + head[i], 0) / weights.length) : weights[chosen];
  const most = Math.max(...row);
  clearAttention(column);
  column.text.classList.add("attending");
  explainAttention(most);
  row.forEach((w, i) => column.tokens[start + i]?.span.style.setProperty("--w", Math.sqrt(w / most).toFixed(3)));
  const strongest = row.map((w, i) => [w, start + i]).sort((a, b) => b[0] - a[0]).slice(0, 5).filter(([w]) => w > 0.005);
  const names = strongest.map(([w, i]) => `${quoted(column.tokens[i].text || column.tokens[i].label)}${i === at ? " (itself)" : ""} ${percent(w)}`);
  const head = chosen === "mean" ? "mean of the heads" : `head ${chosen}`;
  $("attended").textContent = `Layer ${column.layer.value}, ${head}, attends to ${names.join(", ")}`;
  place(column.tokens[at].span);
}

// ---------------------------------------------------------------- start

$("controls").addEventListener("submit", event => { event.preventDefault(); all(column => write(column)); });
$("prompt").addEventListener("keydown", event => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("controls").requestSubmit(); });
$("stop-writing").addEventListener("click", () => columns.forEach(column => column.controller?.abort()));
$("score").addEventListener("click", () => all(scorePrompt));
$("share").addEventListener("click", share);
addEventListener("hashchange", () => location.reload());  // another link
ask("models").then(response => response.json()).then(facts => {
  setUp(facts);
  facts.models.forEach(addColumn);
  if (link.size) all(replay);
}).catch(complain);
