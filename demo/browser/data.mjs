// Images to train on, drawn by the page itself, and those that somebody draws or takes. All of a seed: sample n of a
// source is the same on every machine with the same canvas, so that a run goes on after a pause as if there was none.

/** Numbers in [0, 1) of a seed (mulberry32). */
export function random(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

const between = (draw, low, high) => low + (high - low) * draw();

// -- digits ----------------------------------------------------------------------------------------------
// The strokes of each digit, one or two ways to write it, in a box of 1 x 1.
const STROKES = [
  ["M.5 .06C.16 .06 .16 .94 .5 .94C.84 .94 .84 .06 .5 .06"],
  ["M.36 .26L.54 .08L.54 .92", "M.5 .08L.5 .92"],
  ["M.24 .3C.26 -.02 .76 -.02 .74 .3C.72 .52 .4 .7 .24 .9L.78 .9"],
  ["M.26 .16C.46 -.02 .82 .08 .7 .32C.65 .44 .52 .47 .42 .47C.62 .46 .82 .56 .75 .76C.68 .98 .36 .98 .24 .82"],
  ["M.64 .92L.64 .08L.2 .66L.84 .66", "M.32 .1L.26 .52L.78 .52M.68 .12L.66 .92"],
  ["M.74 .1L.34 .1L.29 .46C.5 .34 .8 .42 .77 .68C.74 .95 .4 .98 .24 .84"],
  ["M.66 .08C.38 .2 .24 .5 .27 .7C.3 .97 .74 .97 .73 .7C.72 .48 .38 .44 .28 .68"],
  ["M.22 .1L.78 .1L.44 .92", "M.24 .1L.76 .1L.46 .92M.36 .5L.7 .5"],
  ["M.5 .48C.2 .38 .24 .06 .5 .06C.76 .06 .8 .38 .5 .48C.18 .6 .18 .94 .5 .94C.82 .94 .82 .6 .5 .48"],
  ["M.7 .3C.66 .02 .28 .04 .28 .32C.28 .56 .66 .56 .7 .3L.66 .92", "M.7 .28C.64 .04 .28 .06 .3 .32C.32 .54 .66 .52 .7 .3C.72 .6 .66 .84 .4 .92"],
];

function drawDigit(context, size, label, draw) {
  context.resetTransform();
  context.fillStyle = "#000";
  context.fillRect(0, 0, size, size);
  const ways = STROKES[label];
  const strokes = ways[Math.floor(draw() * ways.length)];
  const shaken = strokes.replace(/-?\d*\.?\d+/g, (number) => (Number(number) + between(draw, -0.035, 0.035)).toFixed(4));
  const [angle, slant] = [between(draw, -0.25, 0.25), between(draw, -0.2, 0.25)];
  const [width, height] = [between(draw, 0.6, 0.85) * size, between(draw, 0.62, 0.82) * size];
  context.translate(size * between(draw, 0.44, 0.56), size * between(draw, 0.44, 0.56));
  context.rotate(angle);
  context.transform(width, 0, -slant * height, height, 0, 0);
  context.translate(-0.5, -0.5);
  context.lineWidth = between(draw, 0.07, 0.15);
  context.lineCap = context.lineJoin = "round";
  context.strokeStyle = "#fff";
  context.stroke(new Path2D(shaken));
}

// -- pictures --------------------------------------------------------------------------------------------
function colors(draw) {
  const hue = draw() * 360;
  const light = draw() < 0.5;
  const one = `hsl(${hue} ${between(draw, 40, 95)}% ${light ? between(draw, 60, 85) : between(draw, 15, 40)}%)`;
  const other = `hsl(${hue + between(draw, 60, 300)} ${between(draw, 40, 95)}% ${light ? between(draw, 10, 40) : between(draw, 60, 90)}%)`;
  return [one, other];
}

// How each pattern is drawn around the origin, `n` times as wide as its period.
const PATTERNS = {
  stripes: (context, n) => {
    for (let i = -n; i <= n; i += 1) context.fillRect(i, -n, 0.5, 2 * n);
  },
  checks: (context, n) => {
    for (let i = -n; i <= n; i += 1) {
      for (let j = -2 * n; j <= 2 * n; j += 1) context.fillRect(i + (j & 1) / 2, j / 2, 0.5, 0.5);
    }
  },
  dots: (context, n) => {
    for (let i = -n; i <= n; i += 1) {
      for (let j = -n; j <= n; j += 1) {
        context.beginPath();
        context.arc(i, j, 0.26, 0, 7);
        context.fill();
      }
    }
  },
  rings: (context, n) => {
    for (let i = 0; i <= 2 * n; i += 1) {
      context.beginPath();
      context.arc(0, 0, i, 0, 7);
      context.lineWidth = 0.5;
      context.stroke();
    }
  },
};

function drawPicture(context, size, label, draw) {
  const [ground, ink] = colors(draw);
  context.resetTransform();
  context.fillStyle = ground;
  context.fillRect(0, 0, size, size);
  const period = size / between(draw, 4, 9);
  context.translate(size * between(draw, 0.35, 0.65), size * between(draw, 0.35, 0.65));
  context.rotate(draw() * Math.PI);
  context.scale(period, period);
  context.fillStyle = context.strokeStyle = ink;
  Object.values(PATTERNS)[label % 4](context, Math.ceil(size / period));
}

// -- samples ---------------------------------------------------------------------------------------------
/** A canvas that is never shown; one of a document where there are no others. */
export function hiddenCanvas(size) {
  if (typeof OffscreenCanvas !== "undefined") return new OffscreenCanvas(size, size);
  return Object.assign(document.createElement("canvas"), { width: size, height: size });
}

/** Draw sample `n` of a class; the same each time. */
export function drawSample(context, task, label, n) {
  const draw = random(Math.imul(n + 1, 2654435761) ^ (label * 40503));
  (task.kind === "digits" ? drawDigit : drawPicture)(context, task.size, label, draw);
}

/** What a canvas holds as numbers, as the task's model takes them: [channels, size, size], standardised. */
export function pixels(context, task, into, at) {
  const { data } = context.getImageData(0, 0, task.size, task.size);
  const area = task.size * task.size;
  for (let channel = 0; channel < task.channels; channel += 1) {
    const [mean, scale] = [task.mean[channel], 1 / (255 * task.std[channel])];
    const shift = mean / task.std[channel];
    for (let i = 0; i < area; i += 1) into[at + channel * area + i] = data[4 * i + channel] * scale - shift;
  }
}

/** Batches of a task: generated images, or those that were added, or both. */
export class Source {
  constructor(task) {
    this.task = task;
    this.own = [];
    this.use = "generated";
    this.values = task.channels * task.size * task.size;
    this.context = hiddenCanvas(task.size).getContext("2d", { willReadFrequently: true });
  }

  /** An image that somebody drew or took, as `pixels` gives it. */
  add(image, label) {
    this.own.push({ image, label });
  }

  /** The feeds of step `step`. */
  batch(step) {
    return this.#feeds(this.task.batch, random(step + 1), step * this.task.batch);
  }

  /** Images of the same kind that no step trains with; added ones, where only such are trained with. */
  held() {
    return this.#feeds(this.task.evaluated, random(7), 0x40000000);
  }

  #feeds(count, draw, first) {
    const { task, own, use } = this;
    const images = new Float32Array(count * this.values);
    const labels = new BigInt64Array(count);
    for (let i = 0; i < count; i += 1) {
      const [chance, which, label] = [draw(), draw(), draw()];
      if (own.length && (use === "own" || (use === "both" && chance < 0.5))) {
        const sample = own[Math.floor(which * own.length)];
        images.set(sample.image, i * this.values);
        labels[i] = BigInt(sample.label);
      } else {
        labels[i] = BigInt(Math.floor(label * task.classes.length));
        drawSample(this.context, task, Number(labels[i]), first + i);
        pixels(this.context, task, images, i * this.values);
      }
    }
    return { [task.image]: images, [task.label]: labels };
  }
}
