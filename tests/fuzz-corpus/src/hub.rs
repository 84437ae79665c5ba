//! Documents of snapshots, which come from registries, object stores and web servers.

use forkd_hub::config::Config;
use forkd_hub::index::PageIndex;
use forkd_hub::manifest::Artifact;

/// The page index, the manifest and the configuration. The fuzzer does not find compressed streams, so the bytes are also
/// packed first.
pub fn index(data: &[u8]) {
    let _ = PageIndex::decode(data);
    let _ = Artifact::parse(data.to_vec());
    let _ = Config::parse(data);
    let Ok(packed) = zstd::bulk::compress(data, 1) else {
        return;
    };
    if let Ok(index) = PageIndex::decode(&packed) {
        let again = index
            .encode()
            .expect("an index that was read can be written");
        let again = PageIndex::decode(&again).expect("an index that was written can be read");
        assert_eq!(again, index);
    }
}
