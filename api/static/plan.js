"use strict";
const JOB = `/v1/plans/${$("plan").dataset.job}`;
const OPEN = ["queued", "running"];

function theme(layout) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const narrow = innerWidth < 640; // a phone: the legend goes below
  const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line") };
  return {
    ...layout, height: (layout.height || 320) + (narrow ? 110 : 0), paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colour("--text"), size: 12 },
    margin: { l: 60, r: 12, t: 12, b: narrow ? 150 : 44 }, xaxis: { ...axis, automargin: true, ...layout.xaxis }, yaxis: { ...axis, automargin: true, ...layout.yaxis },
    legend: { orientation: "h", font: { size: 11 }, ...(narrow ? { yref: "container", y: 0, yanchor: "bottom" } : { y: 1.02, yanchor: "bottom" }) },
  };
}

function draw(figures) {
  for (const [name, figure] of Object.entries(figures)) {
    Plotly.react(name, figure.data, theme(figure.layout), { responsive: true, displaylogo: false });
  }
}

function showJob(job) {
  const step = job.progress ? ` ${job.progress.stage} ${job.progress.message}` : "";
  const asked = `asked ${job.created_at.slice(0, 19).replace("T", " ")} UTC`;
  $("status").textContent = OPEN.includes(job.status) ? `${job.status}: ${step || "waiting"}` : `${job.status.replace("_", " ")}, ${asked}`;
  $("progress").hidden = $("cancel").hidden = !OPEN.includes(job.status);
  if (job.error) showProblem($("problem"), { message: job.error.detail, errors: job.error.errors });
}

function showVerdict(view) {
  $("verdict").replaceChildren(...view.verdict.map((line) => node("p", line)));
  $("verdict").classList.toggle("bad-plan", !view.stages.length);
}

function showTables(answer, view) {
  const predicted = answer.prediction;
  const terms = Object.entries(predicted.waterfall).map(([name, value]) => [name, seconds(value), `${((100 * value) / predicted.step_time_s).toFixed(1)} %`, view.meanings[name] || ""]);
  $("waterfall-table").replaceChildren(table(["term", ">time", ">share", "meaning"], terms));
  const ranks = predicted.ranks.map((rank) => [rank.stage, `${rank.ranks[0]} to ${rank.ranks[rank.ranks.length - 1]}`, bytes(rank.memory.peak_bytes), bytes(rank.memory.reserved_bytes ?? rank.memory.peak_bytes), bytes(rank.memory.capacity_bytes), rank.memory.peak_moment]);
  $("memory-table").replaceChildren(table([">stage", "devices", ">peak", ">with margin and process", ">capacity", "peak at"], ranks));
  const stages = view.stages.map((row) => [row.stage, row.devices, row.units, row.mesh, row.zero, row.recompute]);
  $("stages").replaceChildren(table([">stage", "devices", "units", "mesh", ">ZeRO", "recompute"], stages));
}

function showRest(answer) {
  const rows = answer.alternatives.map((item) => [node("code", item.strategy), seconds(item.step_time_s), bytes(item.peak_bytes), item.why_not]);
  $("alternatives").replaceChildren(rows.length ? table(["strategy", ">step", ">peak", "why not"], rows) : node("p", "None.", { class: "muted" }));
  const counts = Object.entries(answer.rejected).map(([reason, count]) => `${reason.replaceAll("_", " ")} ${count.toLocaleString("en")}`);
  $("rejected").textContent = counts.length ? `Rejected: ${counts.join(", ")}. ${answer.search.candidates.toLocaleString("en")} candidates in ${seconds(answer.search.wall_s)}.` : "";
  $("explanation").replaceChildren(...answer.explanation.map((line) => node("li", line)));
  const assumed = [...answer.assumptions, ...(answer.prediction ? answer.prediction.assumptions : [])];
  const texts = new Set(assumed.map((item) => `${item.what}${item.value === null ? "" : ` = ${JSON.stringify(item.value)}`} (${item.provenance})`));
  $("assumptions").replaceChildren(...[...texts].map((line) => node("li", line)));
}

async function showAnswer(job) {
  const [view, files] = [await api(`${JOB}/view`), await api(`${JOB}/artifacts`)];
  $("answer").hidden = false;
  $("title").textContent = document.title = view.title;
  showVerdict(view);
  showRest(job.answer);
  $("drawn").hidden = $("why").hidden = $("export").hidden = !job.answer.plan;
  if (job.answer.plan) {
    $("strategy").textContent = job.answer.plan.strategy;
    $("asked").value = job.answer.alternatives.length ? job.answer.alternatives[0].strategy : "";
    showTables(job.answer, view);
    draw(view.figures);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(view.figures));
  }
  $("run").hidden = !job.answer.plan || job.request.cluster !== "local";
  if ($("run").hidden) $("run-hint").textContent = "Only plans for the cluster 'local', this service's own machine, can be run from here.";
  await runs();
  for (const item of files.items) {
    $("artifacts").append(node("a", item.name, { href: item.href, ...(sessionStorage.getItem("token") ? {} : { download: "" }) }), " ");
  }
}

function deltas(rows, form) {
  return rows.map((item) => [item.term, form(item.chosen), form(item.asked), `${item.asked >= item.chosen ? "+" : ""}${form(item.asked - item.chosen)}`]);
}

async function why(event) {
  event.preventDefault();
  try {
    const found = await api(`${JOB}/why-not`, { strategy: $("asked").value });
    const parts = [node("p", found.reason, { class: { slower: "warn", forbidden: "bad", does_not_fit: "bad" }[found.verdict] || "good" })];
    if (found.rules.length > 1) {
      const list = node("ul");
      for (const rule of found.rules) list.append(node("li", rule.message));
      parts.push(list);
    }
    for (const note of found.notes) parts.push(node("p", note, { class: "muted" }));
    if (found.step_time) parts.push(table(["time", ">chosen", ">asked", ">difference"], deltas([...found.terms, found.step_time], seconds)));
    if (found.memory) parts.push(table(["memory", ">chosen", ">asked", ">difference"], deltas([...found.memory_terms, found.memory], bytes)));
    $("reason").replaceChildren(...parts);
  } catch (error) {
    showProblem($("reason"), error);
  }
}

async function take(event) {
  event.preventDefault();
  try {
    const found = await api(`${JOB}/exports/${$("target").value}`);
    const parts = [];
    for (const [name, text] of Object.entries(found.files)) {
      const link = node("a", `Download ${name}`, { download: name, href: URL.createObjectURL(new Blob([text], { type: "text/plain" })) });
      parts.push(node("h3", name), link, node("pre", text, { tabindex: "0" }));
    }
    for (const note of found.notes) parts.push(node("p", note, { class: "warn" }));
    parts.push(node("p", `Checked against ${found.version}.`, { class: "muted" }));
    $("exported").replaceChildren(...parts);
  } catch (error) {
    showProblem($("exported"), error);
  }
}

function percent(value) {
  return value === null || value === undefined ? "" : `${value >= 0 ? "+" : ""}${(100 * value).toFixed(1)} %`;
}

function runRow(job) {
  const [predicted, measured] = [job.prediction, job.measurement];
  const link = node("button", job.status.replace("_", " "), { type: "button", class: "link" });
  link.addEventListener("click", () => compared(job).catch((error) => showProblem($("compared"), error)));
  const state = job.status === "succeeded" ? link : job.status + (job.progress ? `: ${job.progress.stage} ${job.progress.message}` : "");
  const error = predicted && measured && measured.step_time_s ? predicted.step_time_s / measured.step_time_s - 1 : null;
  const losses = measured && measured.losses.length ? `${measured.losses[0].toFixed(3)} to ${measured.losses[measured.losses.length - 1].toFixed(3)}` : "";
  return [job.created_at.slice(0, 19).replace("T", " "), state, predicted ? seconds(predicted.step_time_s) : "", measured ? seconds(measured.step_time_s) : "", percent(error), losses];
}

async function compared(job) {
  const { comparison } = await api(`/v1/executions/${job.id}/comparison`);
  const there = Object.entries(comparison.terms).filter(([, item]) => item.predicted || item.measured);
  const rows = there.map(([name, item]) => [name, seconds(item.predicted), seconds(item.measured), percent(item.relative_error)]);
  const [step, memory] = [comparison.step_time, comparison.peak_memory];
  rows.push(["step", seconds(step.predicted), seconds(step.measured), percent(step.relative_error)]);
  rows.push(["peak memory", bytes(memory.predicted), bytes(memory.measured), percent(memory.relative_error)]);
  const inside = comparison.inside_interval ? "The measured step lies inside the predicted interval." : "The measured step lies outside the predicted interval.";
  $("compared").replaceChildren(node("p", inside, { class: comparison.inside_interval ? "good" : "warn" }), table(["term", ">predicted", ">measured", ">error"], rows));
}

async function runs() {
  const plan = $("plan").dataset.job;
  const page = await api(`/v1/executions?limit=20&plan_id=${plan}`);
  const jobs = await Promise.all(page.items.map((item) => api(`/v1/executions/${item.id}`)));
  $("runs").replaceChildren(jobs.length ? table(["asked (UTC)", "state", ">predicted", ">measured", ">error", "loss"], jobs.map(runRow)) : node("p", "None yet.", { class: "muted" }));
  if (jobs.some((job) => OPEN.includes(job.status))) setTimeout(() => runs().catch((error) => showProblem($("compared"), error)), 1000);
}

async function run(event) {
  event.preventDefault();
  try {
    await api(`${JOB}/executions`, { steps: Number($("steps").value) });
    await runs();
  } catch (error) {
    showProblem($("compared"), error);
  }
}

async function follow() {
  const job = await api(JOB);
  showJob(job);
  if (OPEN.includes(job.status)) {
    setTimeout(() => follow().catch((error) => showProblem($("problem"), error)), 700);
  } else if (job.answer) {
    await showAnswer(job);
  }
}

$("why").addEventListener("submit", why);
$("export").addEventListener("submit", take);
$("run").addEventListener("submit", run);
$("cancel").addEventListener("click", () => api(`${JOB}/cancel`, {}).catch((error) => showProblem($("problem"), error)));
follow().catch((error) => showProblem($("problem"), error));
