//! How many ops travel to the thread of a device at a time.
//!
//! Burn's client sends a frame for every fourth op, which is right for a server that is to start early. Every frame of a
//! loopback socket wakes three threads, though, and the program's ops reach the client in groups of 32 anyway: CubeCL's
//! queue of a device hands them over when it is full. So ops wait for the rest of a frame hardly longer than they wait there.

use burn_std::config::{BurnConfig, RuntimeConfig};
use serde_json::{Value, json};
use std::sync::Once;

/// Ops in a frame: those of a full queue.
const OPS: usize = 32;

/// Has Burn's client send larger frames in this process, unless the program or its `burn.toml` says how large they are, or Burn
/// has looked at its configuration before.
pub(crate) fn enlarge() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let config = BurnConfig::from_current_dir().override_from_env();
        if !enlarged(&config).is_some_and(BurnConfig::try_set) {
            log::debug!("burn-layer: frames are as large as Burn's configuration has them");
        }
    });
}

/// The configuration with larger frames, if it has none of its own.
fn enlarged(config: &BurnConfig) -> Option<BurnConfig> {
    let ops = |config: &BurnConfig| config.remote().flush_threshold;
    if ops(config) != ops(&BurnConfig::default()) {
        return None;
    }
    // Its fields are private; it can be written and read.
    let mut value: Value = serde_json::to_value(config).ok()?;
    *value.pointer_mut("/remote/flush_threshold")? = json!(OPS);
    serde_json::from_value(value).ok()
}
