// Draws from every generator in two clones of one process: draw.js CLONE RUN_DIR [reseed]
'use strict';
const crypto = require('crypto');
const fs = require('fs');
const path = require('path');

const [clones, directory, wanted] = process.argv.slice(2);
const { reseed } = require(path.join(directory, 'reseed.js'));
const loaded = { exports: {} };
process.dlopen(loaded, clones);

function draw() {
  const key = crypto.generateKeyPairSync('ed25519').privateKey;
  return {
    randomBytes: crypto.randomBytes(16).toString('hex'),
    randomUUID: crypto.randomUUID(),
    randomInt: crypto.randomInt(2 ** 40),
    getRandomValues: Buffer.from(crypto.webcrypto.getRandomValues(new Uint8Array(16))).toString('hex'),
    webcryptoUUID: crypto.webcrypto.randomUUID(),
    privateKey: key.export({ type: 'pkcs8', format: 'der' }).toString('hex'),
    mathRandom: Math.random(),
  };
}

draw();
const child = loaded.exports.clone() === 0;
if (wanted === 'reseed') reseed(Buffer.from(child ? 'entropy of one' : 'entropy of the other'));
fs.writeSync(1, `${JSON.stringify(draw())}\n`);
if (!child) loaded.exports.wait();
loaded.exports.exit();
