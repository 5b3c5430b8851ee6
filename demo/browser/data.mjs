// Images to train on, drawn by the page itself, and those that somebody draws or takes. All of a seed: sample n of a
// source is the same on every machine with the same canvas, so that a run goes on after a pause as if there was none.

import { drawDigit } from "./digits.mjs";
import { random } from "./random.mjs";
import { drawScene } from "./scenes.mjs";

/** A canvas that is never shown; one of a document where there are no others. */
export function hiddenCanvas(size) {
  if (typeof OffscreenCanvas !== "undefined") return new OffscreenCanvas(size, size);
  return Object.assign(document.createElement("canvas"), { width: size, height: size });
}

/** Draw sample `n` of a class; the same each time. */
export function drawSample(context, task, label, n) {
  const draw = random(Math.imul(n + 1, 2654435761) ^ (label * 40503));
  (task.kind === "digits" ? drawDigit : drawScene)(context, task.size, label, draw);
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
    this.kept = []; // of the added ones, for evaluations
    this.use = "generated";
    this.values = task.channels * task.size * task.size;
    this.context = hiddenCanvas(task.size).getContext("2d", { willReadFrequently: true });
  }

  /** An image that somebody drew or took, as `pixels` gives it. */
  add(image, label) {
    ((this.own.length + this.kept.length) % 4 === 3 ? this.kept : this.own).push({ image, label });
  }

  /** The feeds of step `step`. */
  batch(step) {
    return this.#feeds(this.task.batch, random(step + 1), step * this.task.batch, this.own);
  }

  /** Images that no step trains with; as long as hardly any were added, those. */
  held() {
    return this.#feeds(this.task.evaluated, random(7), 0x40000000, this.kept.length ? this.kept : this.own);
  }

  #feeds(count, draw, first, own) {
    const { task, use } = this;
    const images = new Float32Array(count * this.values);
    const labels = new Int32Array(count);
    for (let i = 0; i < count; i += 1) {
      const [chance, which, label] = [draw(), draw(), draw()];
      if (own.length && (use === "own" || (use === "both" && chance < 0.5))) {
        const sample = own[Math.floor(which * own.length)];
        images.set(sample.image, i * this.values);
        labels[i] = sample.label;
      } else {
        labels[i] = Math.floor(label * task.classes.length);
        drawSample(this.context, task, labels[i], first + i);
        pixels(this.context, task, images, i * this.values);
      }
    }
    return { [task.image]: images, [task.label]: BigInt64Array.from(labels, BigInt) };
  }
}
