//! Which crate may use which. The folder names are the architecture; this table keeps them true.
//!
//! `contract` is shared, `front` speaks HTTP to the daemon, `control` starts the programs of `host` and never links
//! them, `guest` knows nothing of the outside but the protocol it speaks.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};
use serde::Deserialize;

use crate::finding::Finding;
use crate::source::Tree;

/// A crate (by folder below `crates/`) and the crates of ours that it may use.
type Row = (&'static str, &'static [&'static str]);

/// `*` at the end of a name stands for a whole group.
#[rustfmt::skip]
const ALLOWED: &[Row] = &[
    ("contract/types", &[]),
    ("contract/api", &["contract/types"]),
    ("contract/vmm-proto", &["contract/types"]),
    ("contract/guest-proto", &["contract/types"]),
    ("front/client", &["contract/types", "contract/api"]),
    ("front/machine", &["contract/types", "contract/guest-proto", "guest/client", "host/probe"]),
    ("front/mcp", &["contract/types", "contract/api", "front/client"]),
    ("front/cli", &["contract/types", "contract/api", "front/*", "host/probe"]),
    ("control/store", &["contract/types"]),
    ("control/image", &["contract/types"]),
    ("control/vmm-client", &["contract/types", "contract/vmm-proto"]),
    ("control/controller", &["contract/*", "control/*", "guest/client"]),
    ("host/sys", &["contract/types"]),
    ("host/probe", &["contract/types", "host/sys"]),
    ("host/memory", &["contract/types", "contract/vmm-proto", "host/sys"]),
    ("host/devices", &["contract/types", "contract/vmm-proto", "host/sys", "host/memory"]),
    ("host/net", &["contract/types", "host/sys"]),
    ("host/vmm", &["contract/types", "contract/vmm-proto", "host/*"]),
    ("host/spawner", &["contract/types", "contract/vmm-proto", "host/sys"]),
    ("guest/agent", &["contract/types", "contract/guest-proto"]),
    ("guest/client", &["contract/types", "contract/guest-proto"]),
];

/// Crates of others that a group or crate must not name itself.
#[rustfmt::skip]
const FORBIDDEN: &[Row] = &[
    ("contract/*", &["tokio", "libc", "rustix", "nix", "axum", "hyper", "reqwest", "kvm-ioctls"]),
    ("front/*", &["kvm-ioctls", "vm-memory", "rusqlite"]),
    ("control/*", &["kvm-ioctls", "vm-memory", "virtio-queue", "linux-loader"]),
    ("control/store", &["axum", "hyper", "reqwest"]),
    ("control/image", &["axum"]),
    ("host/*", &["tokio", "axum", "hyper", "reqwest", "rusqlite"]),
    ("host/memory", &["kvm-ioctls"]),
    ("host/devices", &["kvm-ioctls"]),
    ("guest/*", &["axum", "reqwest", "rusqlite", "kvm-ioctls"]),
];

/// Crates of others that must not even come in through somebody else.
const FORBIDDEN_DEEP: &[Row] = &[("contract/*", &["tokio"]), ("host/*", &["tokio"])];

/// Crates that nobody may bring in: licences, dead projects, a second TLS provider. `deny.toml` says the same to others.
const BANNED: &[&str] = &[
    "ring",
    "openssl",
    "openssl-sys",
    "rustables",
    "bincode",
    "tun",
];

pub fn check(tree: &Tree) -> anyhow::Result<Vec<Finding>> {
    Ok(judge(&Graph::of_workspace(&tree.root)?))
}

#[derive(Debug, Default)]
struct Graph {
    members: Vec<Member>,
    /// Every package, with what it pulls into a build (not its tests).
    uses: BTreeMap<String, BTreeSet<String>>,
    names: BTreeMap<String, String>,
}

#[derive(Debug, Clone)]
struct Member {
    id: String,
    name: String,
    /// Folder from the top of the tree.
    folder: String,
    /// Names of direct dependencies; the second field is true for those of tests only.
    dependencies: Vec<(String, bool)>,
}

impl Member {
    /// `contract/types` and the like; `None` for crates outside of `crates/`, which may use anything.
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
            if let Some(way) = graph.way(&member.id, name) {
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
            if let Some(way) = graph.way(&member.id, name) {
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
    /// The shortest chain of names from a package to one called `goal`.
    fn way(&self, from: &str, goal: &str) -> Option<Vec<String>> {
        let mut queue = std::collections::VecDeque::from([vec![from.to_owned()]]);
        let mut seen = BTreeSet::from([from.to_owned()]);
        while let Some(path) = queue.pop_front() {
            let last = path.last()?;
            if path.len() > 1 && self.names.get(last).is_some_and(|name| name == goal) {
                return Some(path.iter().map(|id| self.names[id].clone()).collect());
            }
            for next in self.uses.get(last).into_iter().flatten() {
                if seen.insert(next.clone()) {
                    queue.push_back([path.as_slice(), std::slice::from_ref(next)].concat());
                }
            }
        }
        None
    }

    fn of_workspace(root: &Path) -> anyhow::Result<Self> {
        let output = Command::new("cargo")
            .args([
                "metadata",
                "--format-version",
                "1",
                "--filter-platform",
                "x86_64-unknown-linux-gnu",
            ])
            .current_dir(root)
            .output()
            .context("cannot run cargo metadata")?;
        if !output.status.success() {
            bail!(
                "cargo metadata failed: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        let metadata: Metadata = serde_json::from_slice(&output.stdout)
            .context("cannot read what cargo metadata says")?;
        Ok(Self::from_metadata(metadata, root))
    }

    fn from_metadata(metadata: Metadata, root: &Path) -> Self {
        let workspace: BTreeSet<String> = metadata.workspace_members.into_iter().collect();
        let mut graph = Self::default();
        for package in metadata.packages {
            graph.names.insert(package.id.clone(), package.name.clone());
            if !workspace.contains(&package.id) {
                continue;
            }
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
                id: package.id,
                name: package.name,
                folder,
                dependencies,
            });
        }
        for node in metadata.resolve.nodes {
            let uses = node
                .deps
                .into_iter()
                .filter(|dep| dep.dep_kinds.iter().any(|kind| kind.kind.is_none()))
                .map(|dep| dep.pkg)
                .collect();
            graph.uses.insert(node.id, uses);
        }
        graph
    }
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    workspace_members: Vec<String>,
    resolve: Resolve,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    manifest_path: String,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    kind: Option<String>,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
    deps: Vec<NodeDependency>,
}

#[derive(Deserialize)]
struct NodeDependency {
    pkg: String,
    dep_kinds: Vec<DependencyKind>,
}

#[derive(Deserialize)]
struct DependencyKind {
    kind: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A graph of crates, each `(folder, [dependency, …])`; `dev:` marks a dependency of tests. Ours are named by folder.
    fn graph(crates: &[(&str, &[&str])], others: &[(&str, &[&str])]) -> Graph {
        let mut graph = Graph::default();
        for (folder, dependencies) in crates {
            graph.members.push(Member {
                id: (*folder).to_owned(),
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
            graph.names.insert((*name).to_owned(), (*name).to_owned());
            let uses = dependencies.iter().filter(|d| !d.starts_with("dev:"));
            for used in uses.clone() {
                graph.names.insert((*used).to_owned(), (*used).to_owned());
            }
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
    fn this_workspace_obeys_the_table() {
        let tree = Tree::of_this_workspace().unwrap();
        let findings = check(&tree).unwrap();
        let text: Vec<String> = findings.iter().map(ToString::to_string).collect();
        assert!(text.is_empty(), "{}", text.join("\n"));
    }
}
