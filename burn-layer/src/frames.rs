//! How many ops travel to the thread of a device at a time.
//!
//! Burn's client sends a frame for every fourth op, which is right for a server that should start early. But every frame on a
//! loopback socket wakes three threads, and the program's ops reach the client in groups of 32 anyway, because CubeCL's
//! queue of a device hands them over when it is full. So larger frames hardly make ops wait longer than they wait there.

use burn_std::{
    config::{BurnConfig, RuntimeConfig},
    sync,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::{Arc, Once};

/// The number of ops in a frame: those of a full queue.
const OPS: usize = 32;

/// Makes Burn's client send larger frames in this process, unless `burn.toml` sets their size or Burn's configuration is fixed
/// already, because the program set it or Burn has read it.
pub(crate) fn enlarge() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let config = BurnConfig::from_current_dir().override_from_env();
        if !enlarged(&config).is_some_and(BurnConfig::try_set) {
            log::debug!("burn-layer: frames are as large as Burn's configuration has them");
        }
    });
}

/// The place of the frame size in the configuration.
const KEY: &str = "/remote/flush_threshold";

/// `config` with larger frames, or `None` if `burn.toml` sets their size.
fn enlarged(config: &BurnConfig) -> Option<BurnConfig> {
    if File::from_current_dir().0.pointer(KEY).is_some() {
        return None;
    }
    // The fields of `BurnConfig` are private, but it can be serialized and deserialized.
    let mut value: Value = serde_json::to_value(config).ok()?;
    *value.pointer_mut(KEY)? = json!(OPS);
    serde_json::from_value(value).ok()
}

/// The program's `burn.toml` as it is written, found as Burn finds it. A [`BurnConfig`] does not tell values set in the file
/// from Burn's defaults.
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
