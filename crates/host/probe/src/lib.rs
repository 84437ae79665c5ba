//! Decides whether `/dev/kvm` can carry a guest kernel, by running guest code and timing it.
