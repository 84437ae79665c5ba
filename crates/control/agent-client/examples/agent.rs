//! Asks an agent for something, by hand:
//! `agent TARGET [--token TOKEN] ping|metrics|clock|ps|exec LINE|eval CODE|identity JSON|quiesce|shutdown`,
//! where TARGET is `unix:PATH`, `tcp:ADDRESS:PORT` or `vsock:PATH` (the Unix socket of a VMM).

use std::error::Error;
use std::io::Write;
use std::time::Duration;

use forkd_agent_client::{Client, Options, Output};
use forkd_guest_proto::{AGENT_PORT, EvalRequest, ExecRequest};

/// How long each request may take.
const LIMIT: Duration = Duration::from_secs(3600);

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let target = arguments.next().ok_or("which agent?")?;
    let mut options = Options::default();
    let mut rest: Vec<String> = arguments.collect();
    if rest.first().is_some_and(|word| word == "--token") {
        options.token = rest.drain(..2).nth(1);
    }
    let client = match target.split_once(':') {
        Some(("unix", path)) => Client::connect_unix(path.as_ref(), options).await?,
        Some(("tcp", address)) => Client::connect_tcp(address, options).await?,
        Some(("vsock", path)) => Client::connect_vsock(path.as_ref(), AGENT_PORT, options).await?,
        _ => return Err(format!("{target:?} is no target").into()),
    };
    let client = client.each_within(LIMIT);
    let argument = || rest.get(1).cloned().ok_or("an argument is missing");
    match rest.first().map(String::as_str) {
        Some("ping") => println!("{:#?}", client.ping().await?),
        Some("metrics") => println!("{:#?}", client.metrics().await?),
        Some("clock") => println!("{:#?}", client.clock(Default::default()).await?),
        Some("ps") => println!("{:#?}", client.processes().await?),
        Some("quiesce") => println!("{:#?}", client.quiesce(Default::default()).await?),
        Some("shutdown") => client.shutdown(Default::default()).await?,
        Some("identity") => {
            println!(
                "{:#?}",
                client.identity(serde_json::from_str(&argument()?)?).await?
            );
        }
        Some("eval") => {
            let done = client
                .eval(EvalRequest {
                    code: argument()?,
                    ..Default::default()
                })
                .await?;
            print!("{}", String::from_utf8_lossy(&done.stdout));
            eprint!("{}", String::from_utf8_lossy(&done.stderr));
            println!("{:#?}", done.result);
        }
        Some("exec") => {
            let request = ExecRequest {
                shell: Some(argument()?),
                ..Default::default()
            };
            let mut exec = client.exec(request).await?;
            while let Some(output) = exec.next_output().await? {
                match output {
                    Output::Stdout(bytes) => std::io::stdout().write_all(&bytes)?,
                    Output::Stderr(bytes) => std::io::stderr().write_all(&bytes)?,
                    Output::Lost { bytes: count, .. } => eprintln!("({count} bytes lost)"),
                }
            }
            let result = exec.wait().await?;
            eprintln!("{result:?}");
            std::process::exit(result.status.shell_code());
        }
        _ => {
            return Err(
                "ping, metrics, clock, ps, exec, eval, identity, quiesce or shutdown?".into(),
            );
        }
    }
    Ok(())
}
