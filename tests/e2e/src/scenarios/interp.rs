//! A warm Python interpreter: state between calls, errors, interrupts, and replacement after death.

use anyhow::{Context, bail, ensure};
use forkd_agent_client::{Calls, EvalCapture};
use forkd_guest_proto::{
    ErrorCode, EvalMode, EvalRequest, InterpInfo, InterpStart, JsonText, Warmup,
};
use forkd_testkit::BootOptions;

use crate::scenario::{Registered, Run, everyday};

pub const SCENARIOS: &[Registered] = &[everyday!(state_errors_interrupts_and_death)];

pub async fn state_errors_interrupts_and_death(run: Run) -> anyhow::Result<()> {
    let vm = run.kit.boot(BootOptions::default()).await?;
    let agent = vm.agent().await?;
    let info = agent
        .interp_start(InterpStart {
            language: "python".into(),
            warmup: Warmup {
                imports: vec!["json".into(), "math as m".into()],
                code: "warm = 'yes'".into(),
            },
            ..Default::default()
        })
        .await?;
    ensure!(info.warmup_error.is_none() && info.pid > 1, "{info:?}");
    keeps_state(&agent).await?;
    raises(&agent).await?;
    large_values(&agent).await?;
    interrupt(&agent).await?;
    death(&agent, &info).await?;
    hang(&agent).await
}

async fn call(agent: &Calls, code: &str) -> anyhow::Result<EvalCapture> {
    let request = EvalRequest {
        code: code.to_owned(),
        ..Default::default()
    };
    Ok(agent.eval(request).await?)
}

async fn value(agent: &Calls, code: &str) -> anyhow::Result<String> {
    let done = call(agent, code).await?;
    if let Some(error) = done.result.error {
        bail!("{code}: {}", error.traceback);
    }
    done.result
        .repr
        .with_context(|| format!("{code}: no value"))
}

async fn keeps_state(agent: &Calls) -> anyhow::Result<()> {
    let done = call(agent, "x = 41\ndef double(n):\n    return 2 * n\n").await?;
    ensure!(
        done.result.error.is_none() && done.result.repr.is_none(),
        "{done:?}"
    );
    ensure!(value(agent, "double(x) + 1").await? == "83", "state");
    ensure!(
        value(agent, "(warm, m.floor(2.5))").await? == "('yes', 2)",
        "warm-up"
    );
    let done = call(
        agent,
        "import sys\nprint('out')\nprint('err', file=sys.stderr)\n{'a': [1, 2]}",
    )
    .await?;
    ensure!(
        done.stdout == b"out\n"
            && done.stderr == b"err\n"
            && done.result.repr.as_deref() == Some("{'a': [1, 2]}")
            && done.result.json.as_ref().map(JsonText::get) == Some(r#"{"a":[1,2]}"#),
        "{done:?}"
    );
    let only = EvalRequest {
        code: "x = 5".into(),
        mode: EvalMode::Eval,
        ..Default::default()
    };
    let done = agent.eval(only).await?;
    ensure!(
        done.result
            .error
            .is_some_and(|error| error.name == "SyntaxError"),
        "a statement is no expression"
    );
    Ok(())
}

async fn raises(agent: &Calls) -> anyhow::Result<()> {
    let done = call(agent, "def deep():\n    return 1 / 0\n\ndeep()").await?;
    let error = done.result.error.context("no error")?;
    ensure!(
        error.name == "ZeroDivisionError"
            && error.message == "division by zero"
            && error.traceback.contains("in deep")
            && error.traceback.contains("line 2"),
        "{error:?}"
    );
    ensure!(value(agent, "x").await? == "41", "state after an error");
    Ok(())
}

async fn large_values(agent: &Calls) -> anyhow::Result<()> {
    let text = value(agent, "'a' * 3_000_000").await?;
    ensure!(text.len() == 3_000_002, "{} characters", text.len());
    let code = format!("len({:?})", "b".repeat(500_000));
    ensure!(value(agent, &code).await? == "500000", "long code");
    Ok(())
}

async fn interrupt(agent: &Calls) -> anyhow::Result<()> {
    let mut running = agent
        .eval_stream(EvalRequest {
            code: "print('looping', flush=True)\nwhile True: pass".into(),
            ..Default::default()
        })
        .await?;
    running.next_output().await?.context("nothing printed")?;
    agent.interp_interrupt("python").await?;
    let result = running.wait().await?;
    ensure!(
        result
            .error
            .is_some_and(|error| error.name == "KeyboardInterrupt"),
        "an interrupted call"
    );
    ensure!(value(agent, "x").await? == "41", "state after an interrupt");
    let request = EvalRequest {
        code: "while True: pass".into(),
        timeout_ms: Some(500),
        ..Default::default()
    };
    let done = agent.eval(request).await?;
    ensure!(done.result.timed_out, "{done:?}");
    ensure!(value(agent, "x").await? == "41", "state after a time-out");
    Ok(())
}

async fn death(agent: &Calls, first: &InterpInfo) -> anyhow::Result<()> {
    let died = call(agent, "import os; os._exit(3)").await;
    let Err(error) = died else {
        bail!("a dead interpreter answered");
    };
    let code = error
        .downcast_ref::<forkd_agent_client::Error>()
        .and_then(forkd_agent_client::Error::code);
    ensure!(code == Some(ErrorCode::InterpDied), "{error:?}");
    ensure!(value(agent, "warm").await? == "'yes'", "warm again");
    let done = call(agent, "x").await?;
    ensure!(
        done.result
            .error
            .is_some_and(|error| error.name == "NameError"),
        "the new one knows the old one's state"
    );
    let listed = agent.interp_list().await?;
    let info = listed.first().context("no interpreter")?;
    ensure!(info.restarts == 1 && info.pid != first.pid, "{info:?}");
    Ok(())
}

/// One that does not heed an interrupt is replaced.
async fn hang(agent: &Calls) -> anyhow::Result<()> {
    let request = EvalRequest {
        code: "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
            .into(),
        timeout_ms: Some(500),
        ..Default::default()
    };
    // The response is an error or a timeout.
    let _ = agent.eval(request).await;
    ensure!(value(agent, "warm").await? == "'yes'", "warm again");
    let listed = agent.interp_list().await?;
    let info = listed.first().context("no interpreter")?;
    ensure!(info.restarts == 2, "{info:?}");
    Ok(())
}
