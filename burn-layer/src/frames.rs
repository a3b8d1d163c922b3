//! How many ops travel to the thread of a device at a time.
//!
//! Burn's client sends a frame for every fourth op, which is right for a server that is to start early. Every frame of a
//! loopback socket wakes three threads, though, and the program's ops reach the client in groups of 32 anyway: CubeCL's
//! queue of a device hands them over when it is full. So ops wait for the rest of a frame hardly longer than they wait there.

use burn_std::{
    config::{BurnConfig, RuntimeConfig},
    sync,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::{Arc, Once};

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

/// Where the configuration says how large frames are.
const KEY: &str = "/remote/flush_threshold";

/// The configuration with larger frames, if it has none of its own.
fn enlarged(config: &BurnConfig) -> Option<BurnConfig> {
    if File::from_current_dir().0.pointer(KEY).is_some() {
        return None;
    }
    // Its fields are private; it can be written and read.
    let mut value: Value = serde_json::to_value(config).ok()?;
    *value.pointer_mut(KEY)? = json!(OPS);
    serde_json::from_value(value).ok()
}

/// The program's `burn.toml` as it is written, found as Burn finds it. A [`BurnConfig`] does not tell what the file says from
/// what it leaves to Burn.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
struct File(Value);

impl RuntimeConfig for File {
    fn storage() -> &'static sync::Mutex<Option<Arc<Self>>> {
        static FILE: sync::Mutex<Option<Arc<File>>> = sync::Mutex::new(None);
        &FILE
    }

    fn file_names() -> &'static [&'static str] {
        BurnConfig::file_names()
    }

    fn section_file_names() -> &'static [(&'static str, &'static str)] {
        BurnConfig::section_file_names()
    }
}
