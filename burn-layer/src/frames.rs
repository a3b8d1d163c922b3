//! How ops travel to the thread of a device: 32 at a time, and each for itself.
//!
//! Burn's client sends a frame for every fourth op, which is right for a server that should start early. But every frame on a
//! loopback socket wakes three threads, and the program's ops reach the client in groups of 32 anyway, because CubeCL's
//! queue of a device hands them over when it is full. So larger frames hardly make ops wait longer than they wait there.
//!
//! With Burn's feature `fusion` (which `vision`, `linalg` and `signal` enable by default), the client also collects ops in graphs,
//! which are sent once and named from then on. A layered device cannot run them in Burn 0.22.1: a custom op without tensors, such as
//! a change of scope, ends the thread that collects them; and in a graph, `permute` and `flip` of floats and bools become ops of ints.
//! On a loopback socket graphs save nothing, so they are off.

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
/// already, because the program set it or Burn has read it. And no graphs, in any case.
pub(crate) fn configure() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let config = BurnConfig::from_current_dir().override_from_env();
        let larger = File::from_current_dir().0.pointer(FRAME).is_none();
        if adjusted(&config, larger).is_some_and(BurnConfig::try_set) {
            return;
        }
        log::debug!("burn-layer: frames are as large as Burn's configuration has them");
        // Threads keep the one that they have read, but the client of a device reads it on a thread of its own, which begins with
        // the device.
        let mut fixed = BurnConfig::storage().lock();
        if let Some(without) = fixed.as_deref().and_then(|fixed| adjusted(fixed, false)) {
            *fixed = Some(Arc::new(without));
        }
    });
}

/// The place of the frame size in the configuration.
const FRAME: &str = "/remote/flush_threshold";

/// The place of the size of graphs. With 0, none is begun.
const GRAPH: &str = "/fusion/max_graph_size";

/// `config` without graphs, and with `larger` frames or its own.
fn adjusted(config: &BurnConfig, larger: bool) -> Option<BurnConfig> {
    // The fields of `BurnConfig` are private, but it can be serialized and deserialized.
    let mut value: Value = serde_json::to_value(config).ok()?;
    if larger {
        *value.pointer_mut(FRAME)? = json!(OPS);
    }
    *value.pointer_mut(GRAPH)? = json!(0);
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
