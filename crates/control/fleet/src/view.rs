//! The fleet as a gateway saw it last.

use std::collections::{BTreeMap, BTreeSet};

use forkd_types::NodeName;

/// A host as it last described itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeView {
    /// Address of its daemon.
    pub url: String,
    /// Used part of the scarcest resource, in thousandths.
    pub load: u32,
    /// Sandboxes that fit.
    pub free_slots: u32,
    /// It takes no new sandboxes.
    pub draining: bool,
    /// Tags of snapshots from which children can be started there.
    pub tags: BTreeSet<String>,
    /// Names of its workspaces.
    pub workspaces: BTreeSet<String>,
}

/// All hosts that answered.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct View {
    /// The hosts by name.
    pub nodes: BTreeMap<NodeName, NodeView>,
}

impl View {
    /// The hosts that have a snapshot.
    pub fn holders<'a>(
        &'a self,
        tag: &'a str,
    ) -> impl Iterator<Item = (&'a NodeName, &'a NodeView)> {
        self.nodes
            .iter()
            .filter(move |(_, node)| node.tags.contains(tag))
    }

    /// The host of a workspace.
    pub fn host_of_workspace(&self, name: &str) -> Option<&NodeName> {
        let mut nodes = self.nodes.iter();
        nodes
            .find(|(_, node)| node.workspaces.contains(name))
            .map(|(name, _)| name)
    }
}
