// Gives the generators of a Node.js process a state of their own. See the agent's README for what is covered.
'use strict';
const crypto = require('crypto');
const path = require('path');

// Taken before user code can replace them.
const { createHash, randomInt, randomUUID } = crypto;

// JavaScript cannot reseed OpenSSL, whose generator is behind `crypto`, TLS and Web Crypto. A child has the process ID
// and the memory of its siblings, so OpenSSL does not notice the fork by itself.
function loadAddon() {
  const loaded = { exports: {} };
  process.dlopen(loaded, path.join(__dirname, 'reseed.node'));
  return loaded.exports;
}

// Node.js draws 128 UUIDs and 1024 integers in advance. Drawing more than that leaves nothing of the parent's.
function dropDrawnInAdvance() {
  for (let n = 0; n < 1024; n += 1) randomUUID();
  for (let n = 0; n < 4096; n += 1) randomInt(2);
}

// V8's own generator cannot be seeded, so a child gets another one: xoshiro128**.
function seededRandom(seed) {
  const state = [0, 4, 8, 12].map((at) => seed.readUInt32LE(at));
  const rotate = (value, by) => (value << by) | (value >>> (32 - by));
  const next = () => {
    const result = Math.imul(rotate(Math.imul(state[1], 5), 7), 9) >>> 0;
    const shifted = state[1] << 9;
    state[2] ^= state[0];
    state[3] ^= state[1];
    state[1] ^= state[2];
    state[0] ^= state[3];
    state[2] ^= shifted;
    state[3] = rotate(state[3], 11);
    return result;
  };
  return () => (next() * 0x200000 + (next() >>> 11)) / 2 ** 53;
}

function reseed(entropy) {
  const derive = (label) => createHash('sha256').update(label).update(entropy).digest();
  if (!loadAddon().reseed(derive('openssl'))) throw new Error('OpenSSL did not take the seed');
  dropDrawnInAdvance();
  Math.random = seededRandom(derive('Math.random'));
}

module.exports = { reseed };
