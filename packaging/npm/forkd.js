#!/usr/bin/env node
// Runs the program of the same name from the package with the programs for this system.
"use strict";
const { spawnSync } = require("node:child_process");
const os = require("node:os");
const path = require("node:path");

const name = path.basename(process.argv[1]).replace(/\.js$/, "");
let folder;
try {
  folder = path.dirname(require.resolve("@forkd/linux-x64/package.json"));
} catch {
  console.error(`error: there are no programs of forkd for ${process.platform} on ${process.arch}

hint: forkd runs on Linux on x86_64. If this is such a host, install again without --omit=optional.`);
  process.exit(1);
}
// Ctrl-C reaches the program as well. It ends when it has cleaned up, and so does this launcher.
for (const signal of ["SIGINT", "SIGTERM", "SIGHUP"]) process.on(signal, () => {});
const done = spawnSync(path.join(folder, "bin", name), process.argv.slice(2), { stdio: "inherit" });
if (done.error) {
  console.error(`error: cannot run ${name}\n  because ${done.error.message}`);
  process.exit(1);
}
process.exit(done.signal ? 128 + os.constants.signals[done.signal] : done.status);
