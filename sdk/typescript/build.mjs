// Compiles the sources twice: as ES modules and as CommonJS. Needs only the TypeScript compiler.
import { execFileSync } from "node:child_process";
import { cpSync, mkdirSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const tsc = createRequire(import.meta.url).resolve("typescript/bin/tsc");
rmSync(join(here, "dist"), { recursive: true, force: true });
const compile = (folder, out) => execFileSync(process.execPath, [tsc, "-p", folder, "--outDir", join(here, "dist", out)], { stdio: "inherit" });
compile(here, "esm");
// The compiler takes the kind of module from the nearest package.json: the copy has one that says CommonJS.
const work = join(here, "dist", "work");
mkdirSync(work);
cpSync(join(here, "src"), join(work, "src"), { recursive: true });
cpSync(join(here, "tsconfig.json"), join(work, "tsconfig.json"));
writeFileSync(join(work, "package.json"), '{ "type": "commonjs" }\n');
compile(work, "cjs");
writeFileSync(join(here, "dist", "cjs", "package.json"), '{ "type": "commonjs" }\n');
rmSync(work, { recursive: true });
