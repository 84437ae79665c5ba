// Compiled with the types of the framework: the adapter has the type that the framework wants.
import type { SandboxClient, SandboxSession } from "@openai/agents-core/sandbox";
import { ForkdSandboxClient, ForkdSandboxSession, type ForkdSandboxOptions, type ForkdSessionState } from "./adapters/openai-agents.js";
export const client = (c: ForkdSandboxClient): SandboxClient<ForkdSandboxOptions, ForkdSessionState> => c;
export const session = (s: ForkdSandboxSession): SandboxSession<ForkdSessionState> => s;
