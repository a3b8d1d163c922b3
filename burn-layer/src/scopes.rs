//! How layered devices learn of the scopes of a program.
//!
//! The ops of a layered device run on a thread of the device, in the order in which a thread of the program started them. When a
//! thread enters or leaves a [scope](crate::scoped), it sends a custom op to every layered device, which arrives between the ops
//! before and after it. The scope itself is left in the device's [`Scopes`], because the device is in the same process.
//!
//! (Burn gives each op the stream of its thread. A stream for each scope would tell devices as well, but on plain devices CubeCL
//! synchronizes different streams, and does not order an op that changes a tensor of another stream in place.)

use crate::{LayerSet, scope::Scope};
use burn::{backend::DispatchDevice, tensor::Device};
use burn_ir::CustomOpIr;
use burn_remote::CustomOpClient;
use burn_std::id::StreamId;
use std::{
    any::Any,
    collections::{HashMap, VecDeque, hash_map::Entry},
    sync::{
        Arc, LazyLock, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// The custom op by which the scope of a stream changes.
pub(crate) const CHANGE: &str = "burn_layer::scope";

/// A scope for as long as it is open.
pub(crate) struct Open {
    stream: StreamId,
    outer: Option<Arc<Scope>>,
}

impl Open {
    /// Opens a scope of `value` on the calling thread, inside the one that is open there.
    pub(crate) fn new(value: Arc<dyn Any + Send + Sync>) -> Self {
        let stream = StreamId::current();
        let mut program = program();
        let outer = program.open.get(&stream).cloned();
        program.change(stream, Some(Arc::new(Scope::new(value, outer.clone()))));
        Self { stream, outer }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        program().change(self.stream, self.outer.take());
    }
}

/// The open scopes of the program, and the devices that are told of them.
#[derive(Default)]
struct Program {
    /// The innermost scope of each stream that is in one.
    open: HashMap<StreamId, Arc<Scope>>,
    devices: Vec<(Arc<LayerSet>, CustomOpClient)>,
}

fn program() -> MutexGuard<'static, Program> {
    static PROGRAM: LazyLock<Mutex<Program>> = LazyLock::new(Mutex::default);
    PROGRAM.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Program {
    fn change(&mut self, stream: StreamId, to: Option<Arc<Scope>>) {
        for (layers, client) in &self.devices {
            layers.scopes.announce(stream, to.clone());
            let change = CustomOpIr::new(CHANGE, &[], &[]);
            stream.executes(|| client.register(change));
        }
        match to {
            Some(scope) => self.open.insert(stream, scope),
            None => self.open.remove(&stream),
        };
    }
}

/// Tells the layered `device` of scopes from now on, and of those that are open. No op is on its way to the device.
pub(crate) fn tell(device: &Device, layers: &Arc<LayerSet>) {
    let DispatchDevice::Remote(remote) = device.as_dispatch() else {
        unreachable!("layered devices are served");
    };
    let client = CustomOpClient::new(remote);
    let mut program = program();
    layers.scopes.begin(&program.open);
    program.devices.push((layers.clone(), client));
}

/// Tells a device no more.
pub(crate) fn tell_no_more(layers: &Arc<LayerSet>) {
    let devices = &mut program().devices;
    devices.retain(|(told, _)| !Arc::ptr_eq(told, layers));
}

/// The scopes that the ops of a device are in.
#[derive(Default)]
pub(crate) struct Scopes {
    /// Whether there ever was one, so that the ops of programs without scopes take no lock.
    any: AtomicBool,
    of_streams: Mutex<HashMap<StreamId, OfStream>>,
}

#[derive(Default)]
struct OfStream {
    now: Option<Arc<Scope>>,
    /// What each change that is on its way changes the scope to.
    announced: VecDeque<Option<Arc<Scope>>>,
}

impl Scopes {
    fn of_streams(&self) -> MutexGuard<'_, HashMap<StreamId, OfStream>> {
        let of_streams = self.of_streams.lock();
        of_streams.unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, open: &HashMap<StreamId, Arc<Scope>>) {
        let in_scope = |scope: &Arc<Scope>| OfStream {
            now: Some(scope.clone()),
            announced: VecDeque::new(),
        };
        let open = open
            .iter()
            .map(|(stream, scope)| (*stream, in_scope(scope)));
        let mut of_streams = self.of_streams();
        *of_streams = open.collect();
        self.any.store(!of_streams.is_empty(), Ordering::Release);
    }

    fn announce(&self, stream: StreamId, to: Option<Arc<Scope>>) {
        let mut of_streams = self.of_streams();
        let of_stream = of_streams.entry(stream).or_default();
        of_stream.announced.push_back(to);
        self.any.store(true, Ordering::Release);
    }

    /// A change of the calling thread's stream has arrived.
    pub(crate) fn change(&self) {
        let mut of_streams = self.of_streams();
        let Entry::Occupied(mut of_stream) = of_streams.entry(StreamId::current()) else {
            return;
        };
        let changed = of_stream.get_mut();
        changed.now = changed.announced.pop_front().flatten();
        if changed.now.is_none() && changed.announced.is_empty() {
            of_stream.remove();
        }
    }

    /// The scope that ops of the calling thread's stream are in now.
    pub(crate) fn now(&self) -> Option<Arc<Scope>> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        self.of_streams().get(&StreamId::current())?.now.clone()
    }
}
