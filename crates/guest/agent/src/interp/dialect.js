// Code that a plain script cannot contain: `import` statements, `await` outside of functions, types of TypeScript.
//
// `compile` returns a function that runs the code. A plain script is tried first. If its syntax is refused, types are
// removed and imports become calls, and a read-eval-print loop of Node.js runs a script that awaits something: its
// declarations stay, and its value is that of the last expression.
'use strict';
const Module = require('module');
const { PassThrough } = require('stream');
const vm = require('vm');

const IMPORT = /^[ \t]*import\s+(?:([\w$]+)\s*(?:,\s*)?)?(?:\*\s*as\s+([\w$]+)\s+|\{([^}]*)\}\s*)?(?:from\s*)?(['"])([^'"\n]+)\4[ \t]*;?/gm;
// Modules that remove types, and where an image may have them.
const PLACES = ['/usr/local/lib/', '/usr/share/nodejs/', process.cwd() + '/'];
let loop = null;
let strip;

function script(source, filename) {
  const loader = vm.constants && vm.constants.USE_MAIN_CONTEXT_DEFAULT_LOADER;
  return new vm.Script(source, { filename, ...(loader && { importModuleDynamically: loader }) });
}

// Imported names become variables: a second cell may import them again.
function importsAsCalls(source) {
  return source.replace(IMPORT, (_all, main, all, names, _quote, module) => {
    const from = `await import(${JSON.stringify(module)})`;
    const parts = [];
    if (main) parts.push(`var ${main} = (${from}).default;`);
    if (all) parts.push(`var ${all} = ${from};`);
    if (names !== undefined) parts.push(`var {${names.replace(/\bas\b/g, ':')}} = ${from};`);
    return parts.join(' ') || `${from};`;
  });
}

function findStripper() {
  if (typeof Module.stripTypeScriptTypes === 'function') {
    return (source) => {
      // The function warns that it may change, which is no output of the code.
      const warn = process.emitWarning;
      process.emitWarning = () => {};
      try {
        return Module.stripTypeScriptTypes(source);
      } finally {
        process.emitWarning = warn;
      }
    };
  }
  for (const place of PLACES) {
    try {
      const { transform } = Module.createRequire(place)('sucrase');
      const options = { transforms: ['typescript'], disableESTransforms: true, keepUnusedImports: true };
      return (source) => transform(source, options).code;
    } catch (_) { /* the next place may have it */ }
  }
  return null;
}

function withoutTypes(source) {
  if (strip === undefined) strip = findStripper();
  try {
    return strip ? strip(source) : null;
  } catch (_) {
    return null;
  }
}

function isFunctionBody(source) {
  try {
    new vm.Script(`(async () => {\n${source}\n})`);
    return true;
  } catch (_) {
    return false;
  }
}

function inLoop(source, filename) {
  if (loop === null) {
    const { require } = globalThis;
    const streams = { input: new PassThrough(), output: new PassThrough() };
    loop = Module.createRequire(__filename)('repl').start({ ...streams, prompt: '', terminal: false, useGlobal: true });
    loop.context.require = require;
  }
  return new Promise((resolve, reject) => {
    // Releases of Node.js with domains report errors to that of the loop, and do not call back.
    if (loop._domain) loop._domain.removeAllListeners('error').once('error', reject);
    loop.eval(source + '\n', loop.context, filename, (error, value) => (error ? reject(error) : resolve(value)));
  });
}

function compile(source, filename) {
  try {
    const plain = script(source, filename);
    return () => plain.runInThisContext({ breakOnSigint: true });
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
    for (const text of [source, withoutTypes(source)]) {
      if (text === null) continue;
      const called = importsAsCalls(text);
      if (called === text) {
        try {
          const plain = script(text, filename);
          return () => plain.runInThisContext({ breakOnSigint: true });
        } catch (_) { /* perhaps it awaits something */ }
      }
      if (/\bawait\b/.test(called) && isFunctionBody(called)) return () => inLoop(called, filename);
    }
    throw error;
  }
}

module.exports = { compile };
