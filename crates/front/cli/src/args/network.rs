//! Arguments about the network: `forkd net`, and the flags of `run`, `spawn` and `fork`.

use std::str::FromStr;

use clap::{Args, Subcommand};
use forkd_api::{Inject, NetworkLimits, NetworkPolicy, NetworkRequest};
use forkd_types::{Mode, Rule};

use super::DaemonArgs;

/// Network policy of each sandbox that a command starts.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Network of each sandbox")]
#[group(id = "network", multiple = true)]
pub struct NetworkArgs {
    /// Destinations that need no rule: none, public, open or custom [default: custom with --allow, public with
    /// --deny, else that of the daemon]
    #[arg(long, visible_alias = "network", value_name = "MODE")]
    pub net: Option<Mode>,
    /// Allow a destination, such as api.example:443, *.packages.example, 203.0.113.0/24:5432/tcp or host:11434;
    /// repeatable
    #[arg(long, value_name = "DESTINATION", value_parser = allow)]
    pub allow: Vec<Rule>,
    /// Deny a destination, such as public:25; repeatable
    #[arg(long, value_name = "DESTINATION", value_parser = deny)]
    pub deny: Vec<Rule>,
    /// Limit the network, such as egress_mbit=100, ingress_mbit=200, connections=64 or egress_mib_total=1000;
    /// repeatable
    #[arg(long, value_name = "LIMIT=NUMBER", requires = "net")]
    pub net_limit: Vec<NetLimit>,
    /// Put a secret into a header of requests to a host, such as "api.example Authorization: Bearer ${secret:key}";
    /// with "KEY=" before the host, programs find a placeholder in $KEY and send that; repeatable
    #[arg(long, value_name = "[VAR=]HOST HEADER: VALUE")]
    pub inject: Vec<InjectArg>,
}

/// A header that gets a secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InjectArg(Inject);

impl FromStr for InjectArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let form = || format!("{text:?} is not of the form \"[VAR=]HOST HEADER: VALUE\"");
        let (to, header) = text.split_once(' ').ok_or_else(form)?;
        let (header, value) = header.split_once(':').ok_or_else(form)?;
        let (env, host) = match to.split_once('=') {
            Some((env, host)) => (Some(env.to_owned()), host),
            None => (None, to),
        };
        let inject = Inject {
            host: host.to_owned(),
            header: header.trim().to_owned(),
            value: value.trim().to_owned(),
            env,
        };
        // The daemon checks again; a mistake is shown here before any request.
        inject
            .checked()
            .map_err(|error| forkd_types::chain(&error))?;
        Ok(Self(inject))
    }
}

/// A limit on the network and its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NetLimit(NetworkLimits);

impl FromStr for NetLimit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, value) = text
            .split_once('=')
            .ok_or_else(|| format!("{text:?} is not of the form LIMIT=NUMBER"))?;
        let value = value
            .parse()
            .map_err(|_| format!("{value:?} is not a whole number"))?;
        let mut limits = NetworkLimits::default();
        let place = match name {
            "connections" => &mut limits.connections,
            "new_per_second" => &mut limits.new_per_second,
            "dns_per_second" => &mut limits.dns_per_second,
            "egress_mbit" => &mut limits.egress_mbit,
            "ingress_mbit" => &mut limits.ingress_mbit,
            "egress_mib_total" => &mut limits.egress_mib_total,
            _ => {
                return Err(format!(
                    "{name:?} is no limit: connections, new_per_second, dns_per_second, egress_mbit, ingress_mbit or egress_mib_total"
                ));
            }
        };
        *place = Some(value);
        Ok(Self(limits))
    }
}

/// All limits in one; a later one replaces an earlier one of its name.
pub fn joined(limits: &[NetLimit]) -> NetworkLimits {
    let join = |all: NetworkLimits, NetLimit(one): &NetLimit| NetworkLimits {
        connections: one.connections.or(all.connections),
        new_per_second: one.new_per_second.or(all.new_per_second),
        dns_per_second: one.dns_per_second.or(all.dns_per_second),
        egress_mbit: one.egress_mbit.or(all.egress_mbit),
        ingress_mbit: one.ingress_mbit.or(all.ingress_mbit),
        egress_mib_total: one.egress_mib_total.or(all.egress_mib_total),
    };
    limits.iter().fold(NetworkLimits::default(), join)
}

fn allow(text: &str) -> Result<Rule, String> {
    rule("allow", text)
}

fn deny(text: &str) -> Result<Rule, String> {
    rule("deny", text)
}

fn rule(action: &str, text: &str) -> Result<Rule, String> {
    format!("{action} {text}")
        .parse()
        .map_err(|error| forkd_types::chain(&error))
}

impl NetworkArgs {
    /// The policy as the API takes it; `None` if no flag was given. Denials come first, so that they beat allowances.
    pub fn request(&self) -> Option<NetworkRequest> {
        let mode = match (self.net, self.allow.is_empty(), self.deny.is_empty()) {
            (Some(mode), ..) => mode,
            (None, false, _) => Mode::Custom,
            (None, true, false) => Mode::Public,
            (None, true, true) if !self.inject.is_empty() => Mode::Custom,
            (None, true, true) => return None,
        };
        let rules = self.deny.iter().chain(&self.allow);
        let mut rules: Vec<String> = rules.map(ToString::to_string).collect();
        if mode == Mode::Custom {
            // A host that gets a secret is meant to be reached.
            for InjectArg(inject) in &self.inject {
                let port = if inject.host.contains(':') {
                    ""
                } else {
                    ":443"
                };
                let rule = format!("allow {}{port}", inject.host);
                if !rules.contains(&rule) {
                    rules.push(rule);
                }
            }
        }
        Some(NetworkRequest::Policy(NetworkPolicy {
            mode: mode.to_string(),
            rules,
            limits: joined(&self.net_limit),
            inject: self
                .inject
                .iter()
                .map(|InjectArg(inject)| inject.clone())
                .collect(),
        }))
    }
}

/// Arguments of `forkd net`.
#[derive(Debug, Args)]
#[command(
    after_help = "A policy is a mode and rules. The first rule that matches decides, then the mode:\n  \
    none    nothing is reachable; takes no rules\n  \
    custom  only what a rule allows\n  \
    public  public addresses\n  \
    open    public and private addresses\n\
    Addresses of the host, of metadata services and reserved addresses need a rule that names them,\n\
    in every mode: `forkd net allow sb-… host:11434`.\n\nExamples:\n  \
    forkd net show sb-…                                  policy, counters and open flows\n  \
    forkd net set sb-… public                            every public address\n  \
    forkd net set sb-… --allow '*.packages.example:443'  one site and nothing else\n  \
    forkd net deny sb-… public:25                        no mail; open connections are reset\n  \
    forkd net log -f sb-…                                denied and ended connections as they come"
)]
pub struct NetArgs {
    #[command(subcommand)]
    pub command: NetCommand,
    /// Print the answer as JSON
    #[arg(long, global = true)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Subcommands of `forkd net`.
#[derive(Debug, Subcommand)]
pub enum NetCommand {
    /// Show the policy, the counters and the open flows of a sandbox
    Show {
        /// ID of the sandbox
        id: String,
    },
    /// Replace the policy of a sandbox; connections that the new one does not allow are reset
    Set {
        /// ID of the sandbox
        id: String,
        /// none, public, open or custom [default: custom with --allow, public with --deny]
        #[arg(required_unless_present_any = ["allow", "deny", "inject"])]
        mode: Option<Mode>,
        /// Allow a destination; repeatable
        #[arg(long, value_name = "DESTINATION", value_parser = allow)]
        allow: Vec<Rule>,
        /// Deny a destination; repeatable
        #[arg(long, value_name = "DESTINATION", value_parser = deny)]
        deny: Vec<Rule>,
        /// Put a secret into a header of requests to a host; repeatable
        #[arg(long, value_name = "[VAR=]HOST HEADER: VALUE")]
        inject: Vec<InjectArg>,
    },
    /// Allow destinations: put rules before those of the policy. The mode none becomes custom
    Allow {
        /// ID of the sandbox
        id: String,
        /// Destinations, such as api.example:443
        #[arg(required = true, value_name = "DESTINATION", value_parser = allow)]
        rules: Vec<Rule>,
    },
    /// Deny destinations: put rules before those of the policy
    Deny {
        /// ID of the sandbox
        id: String,
        /// Destinations, such as public:25
        #[arg(required = true, value_name = "DESTINATION", value_parser = deny)]
        rules: Vec<Rule>,
    },
    /// Change limits on the network of a sandbox; 0 lifts a rate or a total
    Limit {
        /// ID of the sandbox
        id: String,
        /// Limits, such as egress_mbit=100, ingress_mbit=200, connections=64, new_per_second=50, dns_per_second=20 or
        /// egress_mib_total=1000
        #[arg(required = true, value_name = "LIMIT=NUMBER")]
        limits: Vec<NetLimit>,
    },
    /// Print denied and ended connections with the reason of the verdict
    Log {
        /// ID of the sandbox
        id: String,
        /// Wait for new entries until interrupted
        #[arg(short, long)]
        follow: bool,
        /// Print only denied connections
        #[arg(long)]
        denied: bool,
    },
    /// Reset every connection of a sandbox
    Reset {
        /// ID of the sandbox
        id: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(mode: Option<Mode>, allowed: &[&str], denied: &[&str]) -> Option<NetworkRequest> {
        let rules = |texts: &[&str], parse: fn(&str) -> Result<Rule, String>| {
            texts.iter().map(|text| parse(text).unwrap()).collect()
        };
        NetworkArgs {
            net: mode,
            allow: rules(allowed, allow),
            deny: rules(denied, deny),
            net_limit: Vec::new(),
            inject: Vec::new(),
        }
        .request()
    }

    #[test]
    fn flags_without_a_mode_have_the_mode_they_mean() {
        assert_eq!(request(None, &[], &[]), None);
        let policy = |request: Option<NetworkRequest>| request.unwrap().checked().unwrap();
        let both = policy(request(None, &["a.example"], &["public:25"]));
        assert_eq!(both.mode(), Mode::Custom);
        let rules: Vec<_> = both.rules().iter().map(ToString::to_string).collect();
        assert_eq!(rules, ["deny public:25", "allow a.example"]);
        assert_eq!(
            policy(request(None, &[], &["public:25"])).mode(),
            Mode::Public
        );
        assert_eq!(
            policy(request(Some(Mode::Open), &[], &[])).mode(),
            Mode::Open
        );
    }

    #[test]
    fn limits_are_read_by_their_names() {
        let parse = |text: &str| text.parse::<NetLimit>();
        let all = ["egress_mbit=5", "connections=7", "egress_mbit=9"];
        let all: Vec<NetLimit> = all.iter().map(|text| parse(text).unwrap()).collect();
        let joined = joined(&all);
        assert_eq!((joined.egress_mbit, joined.connections), (Some(9), Some(7)));
        for text in ["egress=5", "egress_mbit", "egress_mbit=x", "egress_mbit=-1"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
