// Digits as strokes that a hand may have drawn: templates, shaken, slanted and turned.

import { between } from "./random.mjs";

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

/** Draw a digit, white on black; `draw` gives random numbers. */
export function drawDigit(context, size, label, draw) {
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
