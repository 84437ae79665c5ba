//! Where new sandboxes go.
//!
//! Only hosts that have the snapshot are asked, since a child starts in milliseconds there. Among them the load decides. A
//! burst is split in one decision: each child goes to the host that is least loaded after the children before it.
//!
//! A request that may be repeated goes to one host, chosen by its key alone. The repetition reaches the same host, which
//! knows the key.

use std::hash::{DefaultHasher, Hash, Hasher};

use forkd_types::NodeName;

use crate::view::{NodeView, View};

/// How much one more sandbox adds to the load of a host, if nothing else is known: a thousandth.
const LOAD_PER_CHILD: u64 = 1;

/// The part of a burst that one host starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    /// The host that starts them.
    pub node: NodeName,
    /// Its number of children.
    pub count: u32,
}

/// Splits a burst of children over the hosts that have the snapshot. Empty if there is none that takes sandboxes.
pub fn split(view: &View, tag: &str, count: u32) -> Vec<Share> {
    let mut hosts: Vec<Candidate> = view
        .holders(tag)
        .filter(|(_, node)| !node.draining)
        .map(|(name, node)| Candidate::new(name, node))
        .collect();
    let full = hosts.iter().all(|host| host.free == 0);
    for _ in 0..count {
        // A view may be a second old: if all look full, the host has the last word.
        let next = hosts
            .iter_mut()
            .filter(|host| full || host.free > 0)
            .min_by_key(|host| host.load());
        match next {
            Some(host) => host.take(),
            None => break,
        }
    }
    let mut shares: Vec<Share> = hosts
        .into_iter()
        .filter(|host| host.given > 0)
        .map(|host| Share {
            node: host.name.clone(),
            count: host.given,
        })
        .collect();
    // Children that fit nowhere by this view go where most of the others go.
    let placed: u32 = shares.iter().map(|share| share.count).sum();
    if let Some(largest) = shares.iter_mut().max_by_key(|share| share.count) {
        largest.count += count - placed;
    }
    shares
}

/// Hosts for a request with this key, the first choice first. Only the key and the names decide.
pub fn by_key<'a>(hosts: impl IntoIterator<Item = &'a NodeName>, key: &str) -> Vec<NodeName> {
    let mut ranked: Vec<(u64, &NodeName)> = hosts
        .into_iter()
        .map(|name| {
            let mut hasher = DefaultHasher::new();
            (key, name.as_str()).hash(&mut hasher);
            (hasher.finish(), name)
        })
        .collect();
    ranked.sort();
    ranked.into_iter().map(|(_, name)| name.clone()).collect()
}

/// Hosts that take sandboxes, the least loaded first.
pub fn by_load<'a>(hosts: impl IntoIterator<Item = (&'a NodeName, &'a NodeView)>) -> Vec<NodeName> {
    let mut ranked: Vec<_> = hosts
        .into_iter()
        .filter(|(_, node)| !node.draining)
        .map(|(name, node)| (node.load, name))
        .collect();
    ranked.sort();
    ranked.into_iter().map(|(_, name)| name.clone()).collect()
}

struct Candidate<'a> {
    name: &'a NodeName,
    load: u64,
    free: u32,
    given: u32,
}

impl<'a> Candidate<'a> {
    fn new(name: &'a NodeName, node: &NodeView) -> Self {
        Self {
            name,
            load: u64::from(node.load),
            free: node.free_slots,
            given: 0,
        }
    }

    fn load(&self) -> u64 {
        self.load + u64::from(self.given) * LOAD_PER_CHILD
    }

    fn take(&mut self) {
        self.given += 1;
        self.free = self.free.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn name(index: usize) -> NodeName {
        format!("node{index}").parse().unwrap()
    }

    fn view(nodes: &[(u32, u32, bool, bool)]) -> View {
        let nodes = nodes
            .iter()
            .enumerate()
            .map(|(index, (load, free_slots, draining, holds))| {
                let node = NodeView {
                    url: String::new(),
                    load: *load,
                    free_slots: *free_slots,
                    draining: *draining,
                    tags: holds.then(|| "py".to_owned()).into_iter().collect(),
                    workspaces: Default::default(),
                };
                (name(index), node)
            })
            .collect();
        View { nodes }
    }

    #[test]
    fn one_child_goes_to_the_least_loaded_holder() {
        let view = view(&[
            (100, 9, false, false),
            (300, 9, false, true),
            (200, 9, false, true),
            (0, 9, true, true),
            (0, 0, false, true),
        ]);
        let shares = split(&view, "py", 1);
        assert_eq!(
            shares,
            [Share {
                node: name(2),
                count: 1
            }]
        );
        assert_eq!(split(&view, "other", 1), []);
    }

    #[test]
    fn a_burst_levels_the_load() {
        let view = view(&[(0, 100, false, true), (4, 100, false, true)]);
        let shares = split(&view, "py", 10);
        let counts: Vec<u32> = shares.iter().map(|share| share.count).collect();
        assert_eq!(counts, [7, 3]);
    }

    #[test]
    fn full_hosts_are_asked_only_if_there_is_no_other() {
        let shares = split(&view(&[(990, 0, false, true)]), "py", 3);
        assert_eq!(
            shares,
            [Share {
                node: name(0),
                count: 3
            }]
        );
        let both = view(&[(900, 2, false, true), (10, 0, false, true)]);
        assert_eq!(
            split(&both, "py", 2),
            [Share {
                node: name(0),
                count: 2
            }]
        );
    }

    #[test]
    fn a_key_chooses_the_same_host_again_even_if_another_leaves() {
        let all: Vec<NodeName> = (0..9).map(name).collect();
        let first = by_key(&all, "key-1");
        assert_eq!(first, by_key(all.iter().rev(), "key-1"));
        let fewer: Vec<NodeName> = all.iter().filter(|n| **n != first[8]).cloned().collect();
        assert_eq!(by_key(&fewer, "key-1"), first[..8]);
        let firsts: std::collections::BTreeSet<NodeName> = (0..200)
            .map(|key| by_key(&all, &key.to_string())[0].clone())
            .collect();
        assert!(firsts.len() > 6, "keys spread over hosts: {firsts:?}");
    }

    proptest! {
        #[test]
        fn every_child_is_placed_once_and_only_where_it_may_run(
            nodes in proptest::collection::vec((0u32..1001, 0u32..50, any::<bool>(), any::<bool>()), 0..9),
            count in 1u32..300,
        ) {
            let view = view(&nodes);
            let shares = split(&view, "py", count);
            let possible = nodes.iter().any(|(_, _, draining, holds)| !draining && *holds);
            let placed: u32 = shares.iter().map(|share| share.count).sum();
            prop_assert_eq!(placed, if possible { count } else { 0 });
            for share in &shares {
                let node = &view.nodes[&share.node];
                prop_assert!(share.count > 0 && !node.draining && node.tags.contains("py"));
            }
        }
    }
}
