"use strict";
// The rollout browser and the chart of any metric. Every text of the data is set as text, never parsed as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const narrow = matchMedia("(max-width: 45rem)");
const ENDINGS = {
  user_closed: "user closed, content", user_left: "user left, not content", transfer: "transferred",
  out_of_scope: "out of scope", max_messages: "message cap", max_steps: "step cap", max_context: "context full",
  too_many_errors: "error budget spent", empty_message: "empty message", void_user: "void: user failed",
  void_user_errors: "void: user's errors", void_world: "void: world failed",
};
// Indices into data; rollout: k or "all"; missing: what an address asked for in vain.
const at = {run: 0, step: 0, group: 0, rollout: "all", turn: 0, missing: ""};
const byId = (id) => document.getElementById(id);

// ------------------------------------------------------------------------------------------------------- helpers

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

const textOf = (text) => (typeof text === "number" ? data.texts[text] : text);
const signOf = (value) => (value > 0.0005 ? "plus" : value < -0.0005 ? "minus" : "zero");
const signed = (value, digits = 2) => {
  const text = Math.abs(value).toFixed(digits);
  return Number(text) === 0 ? text : (value > 0 ? "+" : "−") + text;
};
const arrow = (value) => ({plus: "▲", minus: "▼", zero: "●"})[signOf(value)];

// ---------------------------------------------------------------------------------------------------- selections

const run = () => data.runs[at.run];
const step = () => run().steps[at.step];
const group = () => step().groups[at.group];
const solved = (rollout) => rollout.reward === 1 && !rollout.void;
const visible = () => group().rollouts.filter((rollout) => at.rollout === "all" || rollout.k === at.rollout);
const ending = (rollout) => ENDINGS[rollout.stop] ?? rollout.stop;
const evaluation = () => run().evaluation === true;  // its dialogues are trials of a task; nothing is trained on them
const what = () => (evaluation() ? "Trial" : "Rollout");
const worldOf = (task) => task.split("/").slice(0, -1).join("/");

function groupLabel(g, _, groups) {
  const one = groups.every((other) => worldOf(other.task) === worldOf(g.task));
  const name = one ? g.task.split("/").at(-1) : g.task;
  return `${name}: ${g.solved} of ${g.rollouts.length} solved${g.mixed || evaluation() ? "" : ", all alike"}`;
}

// One whose rewards differ; of an evaluation, the one with most failures, which stands first.
const firstGroup = () => (evaluation() ? 0 : Math.max(0, step().groups.findIndex((g) => g.mixed)));

function fill(select, labels, chosen) {
  select.replaceChildren(...labels.map((label, i) => el("option", {value: i}, label)));
  select.value = chosen;
}

function choose(change) {
  const task = group().task, number = step().step;
  Object.assign(at, {missing: ""}, change);
  if ("run" in change) {  // the same step, or the one nearest to it
    const far = run().steps.map((s) => Math.abs(s.step - number));
    at.step = far.indexOf(Math.min(...far));
  }
  if ("run" in change || "step" in change) {  // the same task, where it was played
    at.group = Math.max(0, step().groups.findIndex((g) => g.task === task));
  }
  if (narrow.matches && at.rollout === "all") at.rollout = group().rollouts[0].k;
  if (at.rollout !== "all" && !group().rollouts.some((r) => r.k === at.rollout)) at.rollout = group().rollouts[0].k;
  if (!("turn" in change)) at.turn = 0;
  render();
  const place = {run: run().name, step: step().step, group: group().group, rollout: at.rollout};
  remember(new URLSearchParams(at.turn ? {...place, turn: at.turn} : place));
}

// Puts the place among the dialogues (of a page's other hashes, nothing) and the chosen metric into the address.
function remember(place) {
  const metric = byId("metric")?.value;
  if (!place.has("run")) place = new URLSearchParams();
  if (metric) place.set("metric", metric);
  else place.delete("metric");
  history.replaceState(null, "", `#${place}`);
}

function follow(hash) {
  const asked = new URLSearchParams(hash.slice(1));
  if (!asked.has("run")) return false;
  at.missing = "";
  const place = (list, test, name) => {
    const found = list.findIndex(test);
    if (found < 0 && asked.has(name)) at.missing ||= `This page does not have ${name} ${asked.get(name)} of the link. `;
    return Math.max(0, found);
  };
  at.run = place(data.runs, (r) => r.name === asked.get("run"), "run");
  at.step = place(run().steps, (s) => String(s.step) === asked.get("step"), "step");
  at.group = asked.has("group") ? place(step().groups, (g) => String(g.group) === asked.get("group"), "group") : firstGroup();
  const one = group().rollouts.find((r) => String(r.k) === asked.get("rollout"));
  at.rollout = one ? one.k : narrow.matches ? group().rollouts[0].k : "all";
  at.turn = Number(asked.get("turn")) || 0;
  return true;
}

// ------------------------------------------------------------------------------------------------------ dialogue

// Eq. 5's group at turn q: the reactions of the rollouts that a user turn followed, void ones left out.
function reactionsAt(q) {
  const seen = group().rollouts.filter((r) => !r.void && r.segments[q] && r.segments[q].reaction !== null);
  const values = seen.map((r) => r.segments[q].reaction);
  const mean = values.reduce((a, b) => a + b, 0) / (values.length || 1);
  const squares = values.reduce((a, b) => a + (b - mean) ** 2, 0);
  return {seen, mean, sd: values.length > 1 ? Math.sqrt(squares / (values.length - 1)) : 0};
}

function chip(strategy, reaction) {
  const value = reaction ?? 0;
  return el("span", {class: "chip", "data-sign": signOf(value)}, `${strategy || "no label"} ${signed(value, 0)}`);
}

function words(text) {
  return text ? el("p", {class: "say"}, text) : el("p", {class: "say muted"}, "(nothing)");
}

function toolCall(call, whose) {
  const args = textOf(call.arguments ?? ""), result = textOf(call.result ?? "(the dialogue ended before a result)");
  const [title, hint] = call.malformed === undefined ? [call.call, args] : ["malformed call", textOf(call.malformed)];
  return el("details", {class: `tool ${whose}`},
    el("summary", {}, whose === "users" ? "private: " : "", el("code", {}, title), ` ${hint}`),
    args && args !== "{}" ? el("pre", {}, args) : null,
    el("pre", {class: "masked"}, result));
}

// Two bars from a common zero: above, the outcome part; below, hatched, the process part.
function parts(outcome, process) {
  const bar = el("span", {class: "bar", "aria-hidden": "true"}), scale = 2;
  for (const [name, value] of [["outcome", outcome], ["process", process]]) {
    const part = el("i", {class: name, "data-sign": signOf(value)});
    part.style.setProperty("--size", `${Math.min(Math.abs(value) / scale, 1) * 50}%`);
    bar.append(part);
  }
  return bar;
}

function credit(rollout, segment, q) {
  if (evaluation()) return "";
  if (segment.total === null) return el("p", {class: "credit muted"}, "no advantage was computed");
  const process = segment.total - rollout.outcome, {seen, mean, sd} = reactionsAt(q);
  const predicted = sd && segment.reaction !== null ? run().lam * (segment.reaction - mean) / sd : 0;
  let why = "", equation = "";
  if (run().lam === 0) why = "this arm uses no reactions";
  else if (Math.abs(predicted - process) > 0.01) {
    why = run().control === "none" ? "not from the reactions shown here" : `${run().control} control: another reaction`;
  }
  else if (segment.reaction === null) why = "no user turn followed";
  else if (seen.length < 2) why = "no neighbour at this turn";
  else if (!sd) why = "all neighbours met the same reaction";
  else {
    const than = {plus: "better taken than", minus: "worse taken than", zero: "taken as"};
    const bracket = mean < 0 ? `(${signed(mean)})` : mean.toFixed(2);
    why = `${than[signOf(segment.reaction - mean)]} its neighbours: `;
    equation = `${run().lam} × (${signed(segment.reaction, 0)} − ${bracket}) / ${sd.toFixed(2)}`;
  }
  return el("div", {class: "credit"},
    el("p", {class: "total"}, el("b", {}, `${arrow(segment.total)} ${signed(segment.total)}`),
      parts(rollout.outcome, process)),
    el("p", {class: "split"}, `= outcome ${signed(rollout.outcome)} `
      + `${process < -0.0005 ? "−" : "+"} process ${Math.abs(process).toFixed(2)}`),
    el("p", {class: "why"}, why, el("span", {class: "equation"}, equation)));
}

function agentCell(rollout, q) {
  const segment = rollout.segments[q];
  if (!segment) return ended(rollout, q);
  const cell = el("div", {class: "segment", "data-sign": signOf(segment.total ?? 0)}, credit(rollout, segment, q));
  cell.style.setProperty("--heat", `${Math.round(Math.min(Math.abs(segment.total ?? 0) / 2, 1) * 40)}%`);
  for (const part of segment.parts) {
    if (part.say === undefined) cell.append(toolCall(part, "agents"));
    else cell.append(words(textOf(part.say)), part.cut ? el("p", {class: "hint"}, "cut at the token cap") : "");
  }
  return cell;
}

function ended(rollout, q) {
  return q === rollout.segments.length ? el("p", {class: "ended"}, `Ended: ${ending(rollout)}`) : "";
}

function userCell(rollout, q) {
  const segment = rollout.segments[q];
  if (!segment) return "";
  const user = segment.user;
  if (!user || user.say === undefined) {
    return el("div", {class: "user"}, (user?.tools ?? []).map((call) => toolCall(call, "users")),
      el("p", {class: "hint"}, `no user turn followed: ${ending(rollout)}`));
  }
  return el("div", {class: "user"}, chip(segment.strategy, segment.reaction), words(textOf(user.say)),
    (user.tools ?? []).map((call) => toolCall(call, "users")),
    user.end ? el("p", {class: "hint"}, `the user ended the dialogue (${user.end})`) : "");
}

// The row that says what the users of all rollouts made of turn q, whether shown or not.
function turnRow(q, width) {
  const {seen, mean, sd} = reactionsAt(q);
  const chips = group().rollouts.filter((r) => r.segments[q]).map((r) => {
    const f = r.segments[q].reaction;
    const name = `${what().toLowerCase()} ${r.k}: ${f === null ? "no user turn" : signed(f, 0)}`;
    return el("button", {type: "button", class: "dot", "data-k": r.k, "data-sign": signOf(f ?? 0), title: name,
      "aria-label": name, "aria-pressed": String(at.rollout === r.k)}, `${r.k}: ${f === null ? "–" : signed(f, 0)}`);
  });
  const alike = seen.length > 1 && sd === 0 && run().lam ? ": no difference, no process credit" : "";
  const says = evaluation() ? "" : seen.length ? `mean ${signed(mean)}, sd ${sd.toFixed(2)}${alike}` : "no user turn followed";
  return el("tr", {class: "turn", id: `turn-${q + 1}`},
    el("th", {colspan: width, scope: "colgroup"}, el("div", {},
      el("a", {href: "#", "data-turn": q + 1, title: "link to this turn"}, `Turn ${q + 1}`),
      el("span", {class: "dots"}, "reactions ", chips), el("span", {class: "muted"}, says))));
}

function head(rollout) {
  const errors = Object.entries(rollout.errors).map(([kind, n]) => `${n} ${kind}`).join(", ");
  const unsolved = rollout.void ? "void" : rollout.reward > 0 ? `✗ reward ${rollout.reward}` : "✗ not solved";
  const verdict = solved(rollout) ? "✓ solved" : unsolved;
  return el("th", {scope: "col"},
    el("p", {class: "name"}, `${what()} ${rollout.k} `,
      el("span", {class: "verdict", "data-solved": String(solved(rollout))}, verdict)),
    el("p", {class: "hint"}, ending(rollout) + (evaluation() ? "" : `; outcome part ${signed(rollout.outcome)}`)
      + (errors ? `; errors: ${errors}` : "")),
    rollout.reason ? el("p", {}, el("b", {}, "Failed: "), rollout.reason) : "",
    rollout.fault ? el("p", {class: "hint"}, rollout.fault) : "");
}

function row(kind, rollouts, cell) {
  return el("tr", {class: kind}, rollouts.map((rollout) => el("td", {}, cell(rollout))));
}

function opening(rollout) {
  const greeting = rollout.greeting === undefined ? "" : `greeting of the agent: ${textOf(rollout.greeting)}`;
  return el("div", {class: "user"}, el("p", {class: "hint"}, greeting),
    el("span", {class: "chip", "data-sign": "zero"}, "opening"), words(textOf(rollout.opening?.say ?? "")),
    (rollout.opening?.tools ?? []).map((call) => toolCall(call, "users")));
}

function grid() {
  const rollouts = visible(), turns = Math.max(...rollouts.map((r) => r.segments.length));
  const table = el("table", {class: "dialogues"}, el("thead", {}, el("tr", {}, rollouts.map(head))));
  const body = el("tbody", {}, row("opening", rollouts, opening));
  for (let q = 0; q < turns; q++) {
    body.append(turnRow(q, rollouts.length), row("agent", rollouts, (r) => agentCell(r, q)),
      row("reply", rollouts, (r) => userCell(r, q)));
  }
  body.append(row("last", rollouts, (r) => (r.segments.length === turns ? ended(r, turns) : "")));
  table.append(body);
  table.style.setProperty("--columns", rollouts.length);
  const system = textOf(rollouts.find((r) => r.system !== undefined)?.system ?? "(none)");
  const instructions = el("pre", {class: "masked"}, system);
  return [
    el("details", {class: "system"}, el("summary", {}, "The agent's instructions"), instructions),
    el("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "Dialogues, turn by turn"}, table),
  ];
}

// -------------------------------------------------------------------------------------------------------- render

// What training makes of a group, in this arm; or why trials failed.
function lesson(g) {
  if (evaluation()) {
    const reasons = g.rollouts.map((r) => r.reason).filter(Boolean);
    const counts = [...new Set(reasons)].map((name) => `${name} (${reasons.filter((r) => r === name).length})`);
    return counts.length ? `Failed: ${counts.join(", ")}.` : "";
  }
  const {lam, control} = run(), reactions = control === "none" ? "reactions" : `reactions (${control} control)`;
  const which = `${g.mixed ? "Rewards differ" : "All ended alike"}: `;
  if (g.mixed && lam) {
    return `${which}the outcome part tells good rollouts from bad ones, the process part, from the users' ${reactions}, `
      + "tells their turns apart.";
  }
  if (g.mixed) {
    return `${which}the outcome part tells good rollouts from bad ones. This arm uses no reactions, so all turns of a `
      + "rollout get the same.";
  }
  return which + (lam ? `the outcome part is 0, and only the users' ${reactions} can tell one turn from another.`
    : "the outcome part is 0, and as this arm uses no reactions, nothing is learned from this group.");
}

function render() {
  fill(byId("run"), data.runs.map((r) => (r.name === r.arm ? r.name : `${r.name} (${r.arm})`)), at.run);
  fill(byId("step"), run().steps.map((s) => String(s.step)), at.step);
  fill(byId("group"), step().groups.map(groupLabel), at.group);
  byId("step").closest(".field").hidden = evaluation();
  for (const guide of document.querySelectorAll(".guide")) {
    guide.hidden = guide.classList.contains("evaluation") !== evaluation();
  }
  for (const button of document.querySelectorAll("[data-move]")) {
    const many = button.dataset.move === "step" ? run().steps.length : step().groups.length;
    const next = at[button.dataset.move] + Number(button.dataset.by);
    button.disabled = next < 0 || next >= many;
  }
  const names = [["all", "All"], ...group().rollouts.map((r) => [r.k, `${r.k} ${solved(r) ? "✓" : "✗"}`])];
  const focused = document.activeElement, inTurn = focused.closest(".turn")?.id;  // what has it is made anew
  byId("rollouts").replaceChildren(el("legend", {}, what()), ...names.map(([k, label]) => el("button",
    {type: "button", "data-k": k, "aria-pressed": String(at.rollout === k), class: k === "all" && "every"}, label)));
  const g = group(), n = g.rollouts.length;
  byId("group-says").textContent = `${at.missing}Task ${g.task}, ${n} ${what().toLowerCase()}s, ${g.solved} solved. ${lesson(g)}`;
  byId("grid").replaceChildren(...grid());
  const again = focused.dataset.k && byId(inTurn ?? "rollouts")?.querySelector(`[data-k="${focused.dataset.k}"]`);
  if (again) {
    again.focus({preventScroll: true});
    byId(inTurn)?.scrollIntoView({block: "nearest"});
  }
  if (at.turn) byId(`turn-${at.turn}`)?.classList.add("target");
}

// -------------------------------------------------------------------------------------------------------- charts

const PLOT = {left: 0.125, width: 0.855, top: 0.04, height: 0.78};  // shares of a chart, as charts.py draws it

// Marks a step of a chart, and says its values; pick(all its steps, first x, last x) says which.
function readOut(svg, pick) {
  const {x: [low, high], percent, curves} = JSON.parse(svg.dataset.readout);
  const steps = [...new Set(curves.flatMap(([, values]) => values.map(([s]) => s)))].sort((a, b) => a - b);
  if (!steps.length) return;
  const step = pick(steps, low, high), {width, height} = svg.viewBox.baseVal;
  const x = width * (PLOT.left + PLOT.width * (step - low) / (high - low));
  let line = svg.querySelector(".cursor"), says = svg.parentElement.querySelector(".readout");
  if (!line) svg.append(line = document.createElementNS("http://www.w3.org/2000/svg", "path"));
  if (!says) svg.after(says = el("output", {class: "readout"}));
  line.setAttribute("class", "cursor");
  line.setAttribute("d", `M${x} ${PLOT.top * height}v${PLOT.height * height}`);
  const shown = (v) => (percent ? `${(100 * v).toFixed(1)} %` : String(Number(v.toPrecision(3))));
  const found = curves.map(([name, values]) => [name, values.find(([s]) => s === step)]).filter(([, pair]) => pair);
  says.textContent = `step ${step}: ${found.map(([name, [, v]]) => `${name} ${shown(v)}`).join(", ")}`;
  svg.dataset.step = step;
}

function startCharts() {
  byId("curves").addEventListener("pointermove", (event) => {
    const svg = event.target.closest("svg[data-readout]");
    if (!svg) return;
    const box = svg.getBoundingClientRect();
    const place = ((event.clientX - box.left) / box.width - PLOT.left) / PLOT.width;
    readOut(svg, (steps, low, high) => {
      const far = (s) => Math.abs(low + place * (high - low) - s);
      return steps.reduce((a, b) => (far(b) < far(a) ? b : a));
    });
  });
  byId("curves").addEventListener("keydown", (event) => {
    const svg = event.target.closest("svg[data-readout]"), by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!svg || !by) return;
    event.preventDefault();
    readOut(svg, (steps) => steps.at(Math.min(steps.indexOf(Number(svg.dataset.step)) + by, steps.length - 1)));
  });
}

function showMetric(name) {
  const chart = document.querySelector(`template[data-metric="${CSS.escape(name)}"]`);
  byId("metric").value = chart ? name : "";
  byId("metric-chart").hidden = !chart;
  byId("metric-chart").replaceChildren(...(chart ? [chart.content.cloneNode(true)] : []));
}

function startMetrics() {
  byId("metric").addEventListener("change", (event) => {
    showMetric(event.target.value);
    remember(new URLSearchParams(location.hash.slice(1)));
  });
  const followMetric = () => {
    const asked = new URLSearchParams(location.hash.slice(1));
    if (!asked.has("metric")) return;
    showMetric(asked.get("metric"));
    if (!asked.has("run")) document.querySelector(".metric").scrollIntoView();
  };
  followMetric();
  addEventListener("hashchange", followMetric);
}

function startDialogues() {
  at.group = firstGroup();
  const linked = follow(location.hash);
  if (narrow.matches && at.rollout === "all") at.rollout = group().rollouts[0].k;
  render();
  if (linked) (byId(`turn-${at.turn}`) ?? byId("dialogues")).scrollIntoView();
  for (const name of ["run", "step", "group"]) {
    byId(name).addEventListener("change", (event) => choose({[name]: Number(event.target.value)}));
  }
  byId("dialogues").addEventListener("click", (event) => {
    const button = event.target.closest("[data-move], [data-k], [data-turn]");
    if (!button) return;
    event.preventDefault();
    const {move, by, k, turn} = button.dataset;
    if (move) choose({[move]: at[move] + Number(by)});
    else if (turn) choose({turn: Number(turn)});
    else choose({rollout: k === "all" || (Number(k) === at.rollout && !narrow.matches) ? "all" : Number(k)});
  });
  narrow.addEventListener("change", () => choose({rollout: narrow.matches ? group().rollouts[0].k : "all"}));
  addEventListener("hashchange", () => {
    if (follow(location.hash)) {
      render();
      byId("dialogues").scrollIntoView();
    }
  });
}

if (byId("curves")) {
  startCharts();
  startMetrics();
}
if (byId("dialogues")) startDialogues();
