// Shows what the server sends. Every text goes into the page through textContent, never as markup.
"use strict";

const LOG_MAX = 500;
const POINTS_MAX = 1200;

const points = [];

const at = (id) => document.getElementById(id);

function made(kind, text, name) {
  const element = document.createElement(kind);
  if (text !== undefined) element.textContent = text;
  if (name) element.className = name;
  return element;
}

function row(...cells) {
  const line = made("tr");
  line.append(...cells.map((cell) => (cell instanceof Node ? cell : made("td", cell))));
  return line;
}

const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

const colourOf = (peer) => `hsl(${(peer * 137) % 360} 60% 50%)`;

const mega = (bytes) => {
  const value = bytes / 1e6;
  return value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0);
};

function showRun(run) {
  document.title = `pccl: ${counted(run.member_count, "member")}`;
  at("run").textContent = run.idle
    ? `this master coordinates no run: ${run.idle}`
    : `run ${run.run.slice(0, 8)}, term ${run.term}, up ${run.up}: ` +
      `${counted(run.member_count, "member")}, ${counted(run.newcomer_count, "newcomer")}, ` +
      `${run.removal_count} removed`;
  const slow = run.slowest;
  at("slowest").textContent = slow
    ? `slowest: ${slow.who}, last in ${slow.calls} of ${slow.of} calls`
    : "";
  at("members").replaceChildren(...run.members.map(peerCard));
  at("waits").replaceChildren(
    ...run.waits.map((wait) => row(wait.time, `${wait.what} waits for ${wait.whom}`)),
  );
  at("ended").replaceChildren(...run.ended.slice(0, 12).map(endedRow));
  showLinks(run.links);
}

function peerCard(member) {
  const card = made("div", undefined, `peer ${member.state}`);
  card.title = member.where;
  card.style.setProperty("--curve", colourOf(member.peer));
  card.append(
    made("b", member.who),
    made("span", member.awaited ? `${member.state} ${member.awaited}` : member.state),
    made("span", member.progress, "faint"),
    made("span", member.figures, "faint"),
    made("span", member.call || `last: ${member.last_call || "no call"}`, "faint"),
  );
  return card;
}

function endedRow(call) {
  const outcome = made("td", call.outcome, call.outcome === "ok" ? "" : "bad");
  return row(`${call.ago} ago`, call.took, outcome, `last ${call.last} +${call.late}`, call.what);
}

function showLinks(links) {
  const speeds = new Map(links.pairs.map(([from, to, ...facts]) => [`${from} ${to}`, facts]));
  const top = Math.max(1, ...links.pairs.map((pair) => pair[2]));
  const rows = links.peers.map((from, place) => {
    const head = made("th", links.heads[place]);
    head.title = links.who[place];
    const cells = links.peers.map((to) => {
      const [speed, rtt, path, why, remedy] = speeds.get(`${from} ${to}`) || [0, 0, "", "", ""];
      const cell = made("td", speed ? mega(speed) : "");
      const kind = path.split(" by ")[0];
      if (kind && kind !== "direct") cell.append(made("br"), made("small", kind));
      if (speed) {
        const hue = 120 * (Math.log(speed + 1) / Math.log(top + 1));
        cell.style.backgroundColor = `hsl(${hue} 60% 50% / 35%)`;
      }
      const trip = rtt && `round trip ${(rtt / 1000).toFixed(1)} ms`;
      cell.title = [trip, path, why, remedy].filter(Boolean).join("\n");
      return cell;
    });
    return row(head, ...cells);
  });
  at("links").replaceChildren(row(made("th", ""), ...links.heads.map((head) => made("th", head))), ...rows);
}

// Draws lines; each is a list of [x, y] and a colour. The lowest y is at the bottom, or 0.
function draw(id, lines, bottom = 0) {
  const canvas = at(id);
  const scale = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  [canvas.width, canvas.height] = [width * scale, height * scale];
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const all = lines.flatMap((line) => line.points);
  if (!all.length) return;
  const xs = all.map((point) => point[0]);
  const [left, right] = [Math.min(...xs), Math.max(...xs)];
  const ys = all.map((point) => point[1]);
  const low = bottom ?? Math.min(...ys);
  const high = Math.max(...ys);
  const span = high - low || 1;
  const colour = (name) => {
    canvas.style.color = name.startsWith("--") ? `var(${name})` : name;
    return getComputedStyle(canvas).color;
  };
  pen.lineWidth = 1.5;
  for (const line of lines) {
    pen.strokeStyle = colour(line.colour);
    pen.beginPath();
    for (const [x, y] of line.points) {
      const across = right > left ? (x - left) / (right - left) : 1;
      pen.lineTo(across * (width - 2) + 1, height - 14 - ((y - low) / span) * (height - 30));
    }
    pen.stroke();
  }
  pen.fillStyle = colour("--faint");
  pen.font = "11px system-ui";
  pen.fillText(high.toPrecision(3), 0, 11);
  pen.fillText(low ? low.toPrecision(3) : "0", 0, height - 2);
}

function drawAll() {
  const line = (key, name, unit) => ({
    colour: name,
    points: points.map((point) => [point.at, point[key] / unit]),
  });
  draw("calls", [line("calls_per_s", "--works", 1), line("failed_per_s", "--lost", 1)]);
  draw("took", [line("took_ms", "--waits", 1)]);
  draw("bytes", [line("bytes_per_s", "--works", 1e6)]);
  const losses = new Map();
  for (const point of points) {
    for (const [peer, loss] of Object.entries(point.losses)) {
      if (!losses.has(peer)) losses.set(peer, []);
      losses.get(peer).push([point.at, loss]);
    }
  }
  at("losses").hidden = !losses.size;
  const curves = [...losses].map(([peer, curve]) => ({ colour: colourOf(peer), points: curve }));
  draw("loss", curves, null);
}

function take(point) {
  points.push(point);
  if (points.length > POINTS_MAX) points.shift();
}

function showTrouble(text) {
  at("trouble").textContent = text;
  document.body.classList.toggle("old", Boolean(text));
}

const source = new EventSource("events");

source.addEventListener("past", (event) => {
  points.length = 0;
  JSON.parse(event.data).forEach(take);
});

source.addEventListener("picture", (event) => {
  const { trouble, point, run } = JSON.parse(event.data);
  showTrouble(trouble);
  const last = points[points.length - 1];
  if (point && !(last && last.at === point.at)) take(point);
  if (run) showRun(run);
  drawAll();
});

source.addEventListener("log", (event) => {
  const { at: when, level, text } = JSON.parse(event.data);
  const log = at("log");
  const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
  log.append(made("li", `${new Date(when * 1000).toISOString()} ${level} ${text}`, level));
  while (log.childElementCount > LOG_MAX) log.firstElementChild.remove();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
});

source.addEventListener("error", () => {
  showTrouble(source.readyState === EventSource.CLOSED
    ? "the server has closed this page: reload it, or close another one"
    : "no connection to the master's process; trying again");
});

window.addEventListener("resize", drawAll);
