// Compiled with the types of the framework: the adapter has the type that the framework wants.
import type { WorkspaceSandbox } from "@mastra/core/workspace";
import { ForkdMastraSandbox } from "./adapters/mastra.js";
export const sandbox = (s: ForkdMastraSandbox): WorkspaceSandbox => s;
