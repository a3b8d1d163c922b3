//! How layered devices learn of the scopes of a program.
//!
//! The ops of a layered device run on a thread of the device, in the order in which a thread of the program started them. When a
//! thread enters or leaves a [scope](crate::scoped), it sends a custom op to every layered device, which arrives between the ops
//! before and after it. The scope itself is left in the device's [`Scopes`], because the device is in the same process.
//!
//! Every device is told, because a thread may use any of them next. The queue to a device is short, and stays full while another
//! thread waits for the device, perhaps for something that this thread has yet to do. So a [`Messenger`] of each device sends the
//! custom op, and a thread waits for it only for a while.
//!
//! (Burn gives each op the stream of its thread. A stream for each scope would tell devices as well, but on plain devices CubeCL
//! synchronizes different streams, and does not order an op that changes a tensor of another stream in place.)

use crate::{
    LayerSet,
    messenger::{Messenger, Sent},
    scope::Scope,
    seen::Seen,
};
use burn::{backend::DispatchDevice, tensor::Device};
use burn_remote::CustomOpClient;
use burn_std::id::StreamId;
use parking_lot::{Mutex, MutexGuard};
use std::{
    any::Any,
    collections::{HashMap, VecDeque, hash_map::Entry},
    sync::{
        Arc, LazyLock,
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
        let outer = program().open.get(&stream).cloned();
        change(stream, Some(Arc::new(Scope::new(value, outer.clone()))));
        Self { stream, outer }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        change(self.stream, self.outer.take());
    }
}

/// Changes the scope of a stream, and waits until the devices are told. Nothing is locked meanwhile.
fn change(stream: StreamId, to: Option<Arc<Scope>>) {
    let told = program().change(stream, to);
    let only = told.len() == 1;
    let send = |(device, used): (Arc<Told>, bool)| device.messenger.send(stream, used, only);
    let sent: Vec<Sent> = told.into_iter().filter_map(send).collect();
    sent.into_iter().for_each(Sent::wait);
}

/// The open scopes of the program, and the devices that are told of them.
#[derive(Default)]
struct Program {
    /// The innermost scope of each stream that is in one.
    open: HashMap<StreamId, Arc<Scope>>,
    devices: Vec<Arc<Told>>,
}

/// A device that is told of scopes.
struct Told {
    layers: Arc<LayerSet>,
    messenger: Messenger,
}

fn program() -> MutexGuard<'static, Program> {
    static PROGRAM: LazyLock<Mutex<Program>> = LazyLock::new(Mutex::default);
    PROGRAM.lock()
}

impl Program {
    /// Returns the devices to tell, and whether the stream has used them.
    fn change(&mut self, stream: StreamId, to: Option<Arc<Scope>>) -> Vec<(Arc<Told>, bool)> {
        let announced = |device: &Arc<Told>| {
            let used = device.layers.scopes.announce(stream, to.clone())?;
            Some((device.clone(), used))
        };
        let told = self.devices.iter().filter_map(announced).collect();
        match to {
            Some(scope) => self.open.insert(stream, scope),
            None => self.open.remove(&stream),
        };
        told
    }
}

/// Tells the layered `device` of scopes from now on, and of those that are open. No op is on its way to the device.
pub(crate) fn tell(device: &Device, layers: &Arc<LayerSet>) {
    let DispatchDevice::Remote(remote) = device.as_dispatch() else {
        unreachable!("layered devices are served");
    };
    let messenger = Messenger::new(CustomOpClient::new(remote));
    let mut program = program();
    layers.scopes.begin(&program.open);
    let layers = layers.clone();
    program.devices.push(Arc::new(Told { layers, messenger }));
}

/// Whether everything that a device is told is in its queue.
pub(crate) fn is_told(layers: &Arc<LayerSet>) -> bool {
    let program = program();
    let mut devices = program.devices.iter();
    devices.all(|told| !Arc::ptr_eq(&told.layers, layers) || told.messenger.is_idle())
}

/// Tells a device no more.
pub(crate) fn tell_no_more(layers: &Arc<LayerSet>) {
    let devices = &mut program().devices;
    devices.retain(|told| !Arc::ptr_eq(&told.layers, layers));
}

/// The scopes that the ops of a device are in.
#[derive(Default)]
pub(crate) struct Scopes {
    /// Whether there ever was one, so that the ops of programs without scopes take no lock.
    any: AtomicBool,
    streams: Mutex<Streams>,
}

#[derive(Default)]
struct Streams {
    /// The streams that are in a scope, or about to be.
    scoped: HashMap<StreamId, OfStream>,
    /// The streams of which an op has run on the device, since there are scopes.
    used: Seen,
}

#[derive(Default)]
struct OfStream {
    now: Option<Arc<Scope>>,
    /// What each change that is on its way changes the scope to.
    announced: VecDeque<Option<Arc<Scope>>>,
}

/// The number of changes on their way. A device with more has ended.
const CHANGES: usize = 1 << 20;

impl Scopes {
    fn streams(&self) -> MutexGuard<'_, Streams> {
        self.streams.lock()
    }

    fn begin(&self, open: &HashMap<StreamId, Arc<Scope>>) {
        let in_scope = |scope: &Arc<Scope>| OfStream {
            now: Some(scope.clone()),
            announced: VecDeque::new(),
        };
        let open = open
            .iter()
            .map(|(stream, scope)| (*stream, in_scope(scope)));
        let mut streams = self.streams();
        *streams = Streams {
            scoped: open.collect(),
            used: Seen::default(),
        };
        self.any
            .store(!streams.scoped.is_empty(), Ordering::Release);
    }

    /// Leaves a change that is about to be sent. Returns whether the stream has used the device, as far as known; `None` if the
    /// device need not be told, because it has ended.
    fn announce(&self, stream: StreamId, to: Option<Arc<Scope>>) -> Option<bool> {
        let mut streams = self.streams();
        self.any.store(true, Ordering::Release);
        let announced = &mut streams.scoped.entry(stream).or_default().announced;
        if announced.len() == CHANGES {
            return None;
        }
        announced.push_back(to);
        Some(streams.used.contains(stream))
    }

    /// A change of the calling thread's stream has arrived.
    pub(crate) fn change(&self) {
        let mut streams = self.streams();
        let Entry::Occupied(mut of_stream) = streams.scoped.entry(StreamId::current()) else {
            return;
        };
        let changed = of_stream.get_mut();
        if let Some(to) = changed.announced.pop_front() {
            changed.now = to;
        }
        if changed.now.is_none() && changed.announced.is_empty() {
            of_stream.remove();
        }
    }

    /// The scope that ops of the calling thread's stream are in now.
    pub(crate) fn now(&self) -> Option<Arc<Scope>> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        let stream = StreamId::current();
        let mut streams = self.streams();
        streams.used.insert(stream);
        streams.scoped.get(&stream)?.now.clone()
    }
}
