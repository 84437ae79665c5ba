// Settings of a run of E2B's JavaScript suite. Each test has its own sandbox, so files may run beside each other.
import { defineConfig } from 'vitest/config'

export default defineConfig({
  test: {
    include: ['tests/**/*.test.ts'],
    isolate: true,
    // Emulated guests are slow; the suite gives a test 30 seconds.
    testTimeout: 30_000 * Number(process.env.FORKD_E2B_PATIENCE || 1),
    hookTimeout: 30_000 * Number(process.env.FORKD_E2B_PATIENCE || 1),
    maxWorkers: Number(process.env.FORKD_E2B_JOBS || 2),
    environment: 'node',
  },
})
