// Compiled with the types of the framework: the adapter has the type that the framework wants.
import type { SandboxBackendProtocolV2 } from "deepagents";
import { ForkdSandbox } from "./adapters/deepagents.js";
export const backend = (s: ForkdSandbox): SandboxBackendProtocolV2 => s;
