//! Instructions that change the configuration of the image and no file.

use forkd_api::ErrorCode;
use forkd_dockerfile::Kind;

use crate::config::Config;
use crate::error::BuildError;

/// Instructions that change the configuration only.
pub fn configure(config: &mut Config, kind: Kind, line: u32) -> Result<(), BuildError> {
    match kind {
        Kind::Env(all) => {
            for (name, value) in all {
                config.set_env(&name, &value);
            }
        }
        Kind::Label(all) => config.labels.extend(all),
        Kind::Maintainer(text) => {
            config.labels.insert("maintainer".to_owned(), text);
        }
        Kind::Cmd(command) => config.cmd = config.argv(&command),
        Kind::Entrypoint(command) => {
            config.entrypoint = config.argv(&command);
            // Arguments of another program are of no use.
            config.cmd.clear();
        }
        Kind::Shell(argv) => config.shell = argv,
        Kind::User(user) => config.user = Some(user),
        Kind::StopSignal(signal) => config.stop_signal = Some(signal),
        Kind::Healthcheck(health) => config.set_healthcheck(&health),
        Kind::Volume(all) => config.volumes.extend(all),
        Kind::Expose(all) => {
            for text in all {
                let message = format!("{text:.40} is not a port such as 80 or 53/udp");
                let ports = ports(&text)
                    .ok_or_else(|| BuildError::at(line, ErrorCode::DockerfileInvalid, message))?;
                config.ports.extend(ports);
            }
        }
        Kind::Run(_) | Kind::Copy(_) | Kind::Arg(_) | Kind::Workdir(_) => {}
    }
    Ok(())
}

/// `80`, `80/tcp`, `8000-8010/udp`.
fn ports(text: &str) -> Option<Vec<String>> {
    const MOST: u16 = 1024;
    let (range, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
    let protocol = protocol.to_ascii_lowercase();
    if !["tcp", "udp", "sctp"].contains(&protocol.as_str()) {
        return None;
    }
    let (low, high) = match range.split_once('-') {
        Some((low, high)) => (low.parse::<u16>().ok()?, high.parse::<u16>().ok()?),
        None => {
            let port = range.parse().ok()?;
            (port, port)
        }
    };
    if low > high || high - low > MOST {
        return None;
    }
    Some(
        (low..=high)
            .map(|port| format!("{port}/{protocol}"))
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use forkd_dockerfile::Command;

    #[test]
    fn ports_are_parsed() {
        assert_eq!(ports("80").unwrap(), ["80/tcp"]);
        assert_eq!(ports("1-2/UDP").unwrap(), ["1/udp", "2/udp"]);
        for bad in ["", "x", "80/x", "3-1", "70000", "1-9999"] {
            assert_eq!(ports(bad), None, "{bad}");
        }
    }

    #[test]
    fn an_entrypoint_takes_the_command_of_the_base_away() {
        let mut config = Config {
            cmd: vec!["old".into()],
            ..Config::default()
        };
        let exec = Command::Exec(vec!["/app".into()]);
        configure(&mut config, Kind::Entrypoint(exec), 1).unwrap();
        assert!(config.cmd.is_empty());
        configure(&mut config, Kind::Cmd(Command::Shell("a b".into())), 1).unwrap();
        assert_eq!(config.cmd, ["/bin/sh", "-c", "a b"]);
    }
}
