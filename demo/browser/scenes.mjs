// Landscapes in a few strokes, of four kinds; no two are alike.

import { between } from "./random.mjs";

const hsl = (hue, saturation, light) => `hsl(${hue} ${saturation}% ${light}%)`;

/** Fill between two heights with a color that changes from one to the other. */
function fade(context, size, top, bottom, from, to) {
  const gradient = context.createLinearGradient(0, top, 0, bottom);
  gradient.addColorStop(0, from);
  gradient.addColorStop(1, to);
  context.fillStyle = gradient;
  context.fillRect(0, top, size, bottom - top);
}

/** Fill what lies below a wavy line around a height. */
function hills(context, size, height, swing, color, draw) {
  const [phase, waves] = [between(draw, 0, 6.3), between(draw, 2, 6)];
  context.fillStyle = color;
  context.beginPath();
  context.moveTo(0, size);
  for (let i = 0; i <= 24; i += 1) {
    context.lineTo((i / 24) * size, height + swing * Math.sin(phase + (waves * i) / 24) + swing * 0.4 * Math.sin(2.7 * phase + (2.3 * waves * i) / 24));
  }
  context.lineTo(size, size);
  context.fill();
}

function disc(context, x, y, radius, color) {
  context.fillStyle = color;
  context.beginPath();
  context.arc(x, y, radius, 0, 7);
  context.fill();
}

const SCENES = [
  function desert(context, size, horizon, draw) {
    fade(context, size, 0, horizon, hsl(between(draw, 15, 45), 70, between(draw, 60, 75)), hsl(between(draw, 30, 50), 85, 85));
    disc(context, between(draw, 0.1, 0.9) * size, between(draw, 0.1, 0.8) * horizon, between(draw, 0.05, 0.11) * size, hsl(45, 100, 92));
    const hue = between(draw, 25, 42);
    for (let i = 0; i < 4; i += 1) {
      hills(context, size, horizon + (i * (size - horizon)) / 4, 0.04 * size, hsl(hue, 65, between(draw, 48, 66)), draw);
    }
  },
  function forest(context, size, horizon, draw) {
    fade(context, size, 0, size, hsl(between(draw, 90, 200), 30, between(draw, 72, 88)), hsl(between(draw, 80, 120), 40, 40));
    const count = Math.round(between(draw, 16, 34));
    for (let i = 0; i < count; i += 1) {
      const foot = horizon + ((size - horizon) * (i + 1)) / count;
      const [x, height] = [between(draw, -0.05, 1.05) * size, between(draw, 0.3, 0.5) * size];
      context.fillStyle = hsl(between(draw, 95, 150), between(draw, 35, 60), between(draw, 14, 36));
      context.beginPath();
      context.moveTo(x, foot - height);
      context.lineTo(x + 0.28 * height, foot);
      context.lineTo(x - 0.28 * height, foot);
      context.fill();
    }
  },
  function sea(context, size, horizon, draw) {
    fade(context, size, 0, horizon, hsl(between(draw, 195, 215), 70, between(draw, 62, 78)), hsl(200, 60, 90));
    const hue = between(draw, 185, 215);
    fade(context, size, horizon, size, hsl(hue, 70, between(draw, 45, 58)), hsl(hue + 10, 75, between(draw, 25, 38)));
    context.strokeStyle = hsl(hue, 60, 85);
    for (let i = 0; i < 26; i += 1) {
      const far = draw();
      const [x, y, length] = [draw() * size, horizon + far * (size - horizon), (0.03 + 0.12 * far) * size];
      context.lineWidth = (0.004 + 0.012 * far) * size;
      context.beginPath();
      context.moveTo(x - length, y);
      context.quadraticCurveTo(x, y - length * 0.5, x + length, y);
      context.stroke();
    }
    const [x, tall] = [between(draw, 0.15, 0.85) * size, between(draw, 0.1, 0.22) * size];
    context.fillStyle = hsl(0, 0, 97);
    context.beginPath();
    context.moveTo(x, horizon - tall);
    context.lineTo(x + 0.6 * tall, horizon);
    context.lineTo(x, horizon);
    context.fill();
  },
  function night(context, size, horizon, draw) {
    const hue = between(draw, 225, 275);
    fade(context, size, 0, size, hsl(hue, 55, between(draw, 6, 12)), hsl(hue, 45, between(draw, 18, 28)));
    for (let i = 0; i < 40; i += 1) {
      disc(context, draw() * size, draw() * horizon, between(draw, 0.003, 0.009) * size, hsl(50, 60, between(draw, 75, 98)));
    }
    disc(context, between(draw, 0.1, 0.9) * size, between(draw, 0.1, 0.6) * horizon, between(draw, 0.05, 0.09) * size, hsl(50, 45, 88));
    for (let i = 0; i < 3; i += 1) {
      hills(context, size, horizon + i * 0.12 * size, 0.06 * size, hsl(hue, 30, 9 - 3 * i), draw);
    }
  },
];

/** Draw a landscape of kind `label`; `draw` gives random numbers. */
export function drawScene(context, size, label, draw) {
  context.resetTransform();
  SCENES[label](context, size, between(draw, 0.4, 0.65) * size, draw);
}
