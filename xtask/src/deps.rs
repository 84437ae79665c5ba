//! Checks which crate uses which. The folders are the architecture, and this table enforces it.
//!
//! `base` holds system-call helpers without product knowledge, `contract` is shared, `front` speaks HTTP to the daemon,
//! `control` starts the programs of `host` and never links them, `guest` knows nothing of the outside but the protocol it
//! speaks.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};
use serde::Deserialize;

use crate::finding::Finding;
use crate::source::Tree;

/// A crate (by its folder below `crates/`) and the workspace crates that it may use.
type Row = (&'static str, &'static [&'static str]);

/// A `*` at the end of a name stands for a whole group.
#[rustfmt::skip]
const ALLOWED: &[Row] = &[
    ("base/os", &[]),
    ("base/channel", &["contract/vmm-proto"]),
    ("contract/types", &[]),
    ("contract/formats", &["contract/types"]),
    ("contract/api", &["contract/types"]),
    ("contract/vmm-proto", &["contract/types", "contract/formats"]),
    ("contract/net-proto", &["contract/types", "contract/vmm-proto"]),
    ("contract/guest-proto", &["contract/types"]),
    ("front/rest-client", &["contract/types", "contract/api"]),
    ("front/machine", &["contract/types", "contract/guest-proto", "control/agent-client", "host/probe"]),
    ("front/mcp", &["contract/types", "contract/api", "front/rest-client"]),
    ("front/gateway", &["contract/types", "contract/api", "front/rest-client", "control/fleet", "control/edge"]),
    ("front/cli", &["contract/types", "contract/api", "front/*", "host/probe", "control/hub", "control/oci", "control/dockerfile"]),
    ("control/store", &["base/os", "contract/types", "contract/formats"]),
    // A program of its own, which confines itself with the jail of the host programs.
    ("control/image", &["base/os", "contract/types", "contract/formats", "control/oci", "host/sys"]),
    ("control/oci", &[]),
    ("control/dockerfile", &[]),
    ("control/builds", &["contract/*", "control/dockerfile", "control/store", "control/agent-client", "control/sandboxes"]),
    ("control/hub", &["base/os", "contract/types", "control/oci"]),
    ("control/agent-client", &["contract/types", "contract/guest-proto"]),
    ("control/vmm-link", &["base/channel", "contract/types", "contract/vmm-proto", "contract/net-proto"]),
    ("control/sandboxes", &["base/os", "contract/*", "control/store", "control/hub", "control/vmm-link", "control/agent-client"]),
    ("control/fleet", &["contract/types"]),
    ("control/edge", &["contract/types", "contract/api", "control/sandboxes"]),
    ("control/planes", &["contract/*", "control/store", "control/agent-client", "control/sandboxes", "control/builds", "control/edge"]),
    // The daemon answers `/mcp` itself: the tools call its own routes through the client.
    ("control/controller", &["base/*", "contract/*", "control/*", "front/mcp", "front/rest-client"]),
    ("host/sys", &["base/channel", "contract/types"]),
    ("host/probe", &["contract/types", "host/sys"]),
    ("host/memory", &["base/os", "contract/types", "contract/vmm-proto", "host/sys"]),
    ("host/devices", &["contract/types", "contract/formats", "contract/vmm-proto", "host/sys", "host/memory"]),
    ("host/net", &["base/os", "base/channel", "contract/types", "contract/net-proto", "host/sys"]),
    ("host/broker", &["base/os", "base/channel", "contract/types", "contract/net-proto", "host/sys"]),
    ("host/vmm", &["contract/types", "contract/vmm-proto", "host/*"]),
    ("host/firecracker", &["base/os", "contract/types", "contract/formats", "contract/vmm-proto", "host/sys", "host/devices"]),
    ("host/spawner", &["base/os", "contract/types", "contract/vmm-proto", "host/sys"]),
    ("guest/agent", &["contract/types", "contract/guest-proto"]),
];

/// External crates that a group or crate must not use directly.
#[rustfmt::skip]
const FORBIDDEN: &[Row] = &[
    ("base/*", &["tokio", "axum", "hyper", "reqwest", "rusqlite", "kvm-ioctls"]),
    ("contract/*", &["tokio", "libc", "rustix", "nix", "axum", "hyper", "reqwest", "kvm-ioctls"]),
    ("front/*", &["kvm-ioctls", "vm-memory", "rusqlite"]),
    ("control/*", &["kvm-ioctls", "vm-memory", "virtio-queue", "linux-loader"]),
    ("control/store", &["axum", "hyper", "reqwest"]),
    ("control/sandboxes", &["axum", "hyper", "http", "tower", "reqwest"]),
    ("control/image", &["axum"]),
    ("control/hub", &["axum"]),
    ("host/*", &["tokio", "axum", "hyper", "reqwest", "rusqlite"]),
    ("host/memory", &["kvm-ioctls"]),
    ("host/devices", &["kvm-ioctls"]),
    ("guest/*", &["axum", "reqwest", "rusqlite", "kvm-ioctls"]),
];

/// External crates that must not be used indirectly, either.
const FORBIDDEN_DEEP: &[Row] = &[("contract/*", &["tokio"]), ("host/*", &["tokio"])];

/// External crates that are banned completely: licences, abandoned projects, a second TLS provider.
/// `deny.toml` has the same list.
const BANNED: &[&str] = &[
    "ring",
    "openssl",
    "openssl-sys",
    "rustables",
    "bincode",
    "tun",
];

const TARGET: &str = "x86_64-unknown-linux-gnu";

pub fn check(tree: &Tree) -> anyhow::Result<Vec<Finding>> {
    Ok(judge(&Graph::of_workspace(&tree.root)?))
}

#[derive(Debug, Default)]
struct Graph {
    members: Vec<Member>,
    /// Every package as `name version`, with its dependencies in a build (without tests).
    uses: BTreeMap<String, BTreeSet<String>>,
}

#[derive(Debug, Clone)]
struct Member {
    name: String,
    /// Folder relative to the root of the tree.
    folder: String,
    /// Names of direct dependencies. The second field is true for dependencies of tests.
    dependencies: Vec<(String, bool)>,
}

impl Member {
    /// For example `contract/types`. `None` for crates outside `crates/`, which may use any crate.
    fn place(&self) -> Option<&str> {
        self.folder.strip_prefix("crates/")
    }
}

fn judge(graph: &Graph) -> Vec<Finding> {
    let mut findings = Vec::new();
    let folders: BTreeMap<&str, &str> = graph
        .members
        .iter()
        .map(|m| (m.name.as_str(), m.folder.as_str()))
        .collect();
    for member in &graph.members {
        let Some(place) = member.place() else {
            continue;
        };
        let manifest = format!("{}/Cargo.toml", member.folder);
        let mut complain = |message: String| findings.push(Finding::in_file(&manifest, message));
        let Some((_, allowed)) = ALLOWED.iter().find(|(crate_, _)| *crate_ == place) else {
            complain(format!("{place} is not in the dependency table of xtask"));
            continue;
        };
        for (name, tests_only) in &member.dependencies {
            match folders
                .get(name.as_str())
                .map(|folder| (folder, folder.strip_prefix("crates/")))
            {
                Some((_, Some(theirs))) => {
                    if !matches_any(theirs, allowed) && !tests_only {
                        complain(format!("{place} must not use {theirs}"));
                    }
                }
                Some((folder, None)) if !tests_only => {
                    complain(format!(
                        "{place} must not use {folder} outside of its tests"
                    ));
                }
                Some(_) => {}
                None => {
                    if !tests_only
                        && rows_for(FORBIDDEN, place).any(|them| them.contains(&name.as_str()))
                    {
                        complain(format!("{place} must not use the crate {name}"));
                    }
                }
            }
        }
        for name in rows_for(FORBIDDEN_DEEP, place).flat_map(|them| them.iter()) {
            if let Some(way) = graph.way(&member.name, name) {
                complain(format!(
                    "{place} must not reach the crate {name}: {}",
                    way.join(" > ")
                ));
            }
        }
    }
    findings.extend(banned(graph));
    findings
}

fn banned(graph: &Graph) -> Vec<Finding> {
    let mut findings = Vec::new();
    for member in &graph.members {
        for name in BANNED {
            if let Some(way) = graph.way(&member.name, name) {
                let manifest = format!("{}/Cargo.toml", member.folder);
                let message = format!("the crate {name} is banned: {}", way.join(" > "));
                findings.push(Finding::in_file(&manifest, message));
            }
        }
    }
    findings
}

fn rows_for(rows: &'static [Row], place: &str) -> impl Iterator<Item = &'static [&'static str]> {
    rows.iter()
        .filter(move |(who, _)| matches_any(place, &[who]))
        .map(|(_, them)| *them)
}

fn matches_any(place: &str, patterns: &[&str]) -> bool {
    patterns
        .iter()
        .any(|pattern| match pattern.strip_suffix('*') {
            Some(group) => place.starts_with(group),
            None => place == *pattern,
        })
}

impl Graph {
    /// The shortest chain of dependencies from a workspace crate to `goal`.
    fn way(&self, from: &str, goal: &str) -> Option<Vec<String>> {
        let starts = self.uses.keys().filter(|package| name_of(package) == from);
        let mut queue: VecDeque<Vec<&str>> = starts.map(|start| vec![start.as_str()]).collect();
        let mut seen = BTreeSet::new();
        while let Some(path) = queue.pop_front() {
            let last = *path.last()?;
            if name_of(last) == goal {
                return Some(
                    path.iter()
                        .map(|package| name_of(package).to_owned())
                        .collect(),
                );
            }
            for next in self.uses.get(last).into_iter().flatten() {
                if seen.insert(next) {
                    queue.push_back([path.as_slice(), &[next.as_str()]].concat());
                }
            }
        }
        None
    }

    fn of_workspace(root: &Path) -> anyhow::Result<Self> {
        let metadata = cargo(root, &["metadata", "--format-version", "1", "--no-deps"])?;
        let metadata: Metadata =
            serde_json::from_str(&metadata).context("cannot read what cargo metadata says")?;
        // `cargo metadata` also resolves optional packages that no build uses; `cargo tree` does not.
        let tree = cargo(
            root,
            &[
                "tree",
                "--workspace",
                "-e",
                "normal",
                "--target",
                TARGET,
                "--prefix",
                "depth",
            ],
        )?;
        let mut graph = Self::from_metadata(metadata, root);
        graph.uses = parse_tree(&tree);
        Ok(graph)
    }

    fn from_metadata(metadata: Metadata, root: &Path) -> Self {
        let mut graph = Self::default();
        for package in metadata.packages {
            let folder = Path::new(&package.manifest_path)
                .parent()
                .and_then(|folder| folder.strip_prefix(root).ok())
                .map(|folder| folder.to_string_lossy().into_owned())
                .unwrap_or_default();
            let dependencies = package
                .dependencies
                .into_iter()
                .map(|dependency| (dependency.name, dependency.kind.as_deref() == Some("dev")))
                .collect();
            graph.members.push(Member {
                name: package.name,
                folder,
                dependencies,
            });
        }
        graph
    }
}

fn cargo(root: &Path, arguments: &[&str]) -> anyhow::Result<String> {
    let output = Command::new("cargo")
        .args(arguments)
        .current_dir(root)
        .output()
        .with_context(|| format!("cannot run cargo {}", arguments[0]))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("cargo {} failed: {}", arguments[0], said.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Parses lines such as `2serde v1.0.229 (*)`: depth, name, version. The dependencies of a package follow its
/// first mention.
fn parse_tree(text: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut uses: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut stack: Vec<String> = Vec::new();
    for line in text.lines() {
        let digits = line.chars().take_while(char::is_ascii_digit).count();
        let (depth, rest) = line.split_at(digits);
        let Ok(depth) = depth.parse::<usize>() else {
            continue;
        };
        let mut words = rest.split_whitespace();
        let (Some(name), Some(version)) = (words.next(), words.next()) else {
            continue;
        };
        let package = format!("{name} {version}");
        stack.truncate(depth);
        if let Some(user) = stack.last() {
            uses.entry(user.clone())
                .or_default()
                .insert(package.clone());
        }
        stack.push(package);
    }
    uses
}

fn name_of(package: &str) -> &str {
    package.split(' ').next().unwrap_or(package)
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    manifest_path: String,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    kind: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A graph of crates, each `(folder, [dependency, …])`. `dev:` marks a dependency of tests. Workspace
    /// crates are named by folder.
    fn graph(crates: &[(&str, &[&str])], others: &[(&str, &[&str])]) -> Graph {
        let mut graph = Graph::default();
        for (folder, dependencies) in crates {
            graph.members.push(Member {
                name: (*folder).to_owned(),
                folder: (*folder).to_owned(),
                dependencies: dependencies
                    .iter()
                    .map(|d| {
                        (
                            d.trim_start_matches("dev:").to_owned(),
                            d.starts_with("dev:"),
                        )
                    })
                    .collect(),
            });
        }
        for (name, dependencies) in crates.iter().chain(others) {
            let uses = dependencies.iter().filter(|d| !d.starts_with("dev:"));
            graph
                .uses
                .insert((*name).to_owned(), uses.map(|d| (*d).to_owned()).collect());
        }
        graph
    }

    fn messages(graph: &Graph) -> Vec<String> {
        judge(graph)
            .into_iter()
            .map(|finding| finding.message)
            .collect()
    }

    #[test]
    fn the_table_lets_the_design_through() {
        let fine = graph(
            &[
                ("crates/contract/types", &["serde"]),
                ("crates/contract/vmm-proto", &["crates/contract/types"]),
                ("crates/host/sys", &["libc", "crates/contract/types"]),
                (
                    "crates/host/vmm",
                    &["crates/host/sys", "crates/contract/vmm-proto", "kvm-ioctls"],
                ),
                ("crates/front/cli", &["tokio", "crates/contract/types"]),
            ],
            &[],
        );
        assert_eq!(messages(&fine), Vec::<String>::new());
    }

    #[test]
    fn control_never_links_host() {
        let bad = graph(
            &[
                ("crates/host/vmm", &[]),
                ("crates/control/controller", &["crates/host/vmm"]),
            ],
            &[],
        );
        assert_eq!(messages(&bad), ["control/controller must not use host/vmm"]);
    }

    #[test]
    fn a_crate_outside_the_table_is_a_finding() {
        let bad = graph(&[("crates/host/extra", &[])], &[]);
        assert_eq!(
            messages(&bad),
            ["host/extra is not in the dependency table of xtask"]
        );
    }

    #[test]
    fn a_contract_names_no_operating_system() {
        let bad = graph(&[("crates/contract/types", &["libc"])], &[]);
        assert_eq!(
            messages(&bad),
            ["contract/types must not use the crate libc"]
        );
    }

    #[test]
    fn tokio_does_not_come_into_host_by_the_back_door() {
        let bad = graph(
            &[("crates/host/sys", &["middle"])],
            &[("middle", &["tokio"]), ("tokio", &[])],
        );
        assert_eq!(
            messages(&bad),
            ["host/sys must not reach the crate tokio: crates/host/sys > middle > tokio"]
        );
    }

    #[test]
    fn tests_may_use_the_test_kit_and_more() {
        let crates: &[(&str, &[&str])] = &[
            ("tests/testkit", &["crates/host/sys"]),
            ("crates/host/sys", &["dev:tests/testkit", "dev:tokio"]),
        ];
        assert_eq!(messages(&graph(crates, &[])), Vec::<String>::new());
        let bad = graph(
            &[
                ("tests/testkit", &[]),
                ("crates/host/sys", &["tests/testkit"]),
            ],
            &[],
        );
        assert_eq!(
            messages(&bad),
            ["host/sys must not use tests/testkit outside of its tests"]
        );
    }

    #[test]
    fn banned_crates_are_found_however_deep() {
        let bad = graph(
            &[("tests/e2e", &["tls"])],
            &[("tls", &["ring"]), ("ring", &[])],
        );
        assert_eq!(
            messages(&bad),
            ["the crate ring is banned: tests/e2e > tls > ring"]
        );
    }

    #[test]
    fn the_tree_is_read_with_its_repetitions() {
        let uses = parse_tree("0a v1 (/x)\n1b v2\n2c v3\n1c v3 (*)\n\n0d v1 (/y)\n1b v2 (*)\n");
        let of = |package: &str| uses[package].iter().map(String::as_str).collect::<Vec<_>>();
        assert_eq!(of("a v1"), ["b v2", "c v3"]);
        assert_eq!(of("b v2"), ["c v3"]);
        assert_eq!(of("d v1"), ["b v2"]);
    }
}
