// Compiled with the types of the framework: the adapter has the type that the framework wants.
import type { Experimental_SandboxSession } from "ai";
import { ForkdSession } from "./adapters/ai-sdk.js";
export const session = (s: ForkdSession): Experimental_SandboxSession => s;
