//! How layered devices learn of the scopes of a program.
//!
//! The ops of a layered device run on a thread of the device, in the order in which a thread of the program started them. When a
//! thread enters or leaves a [scope](crate::scoped), it sends a custom op to every layered device, which arrives between the ops
//! before and after it. The scope itself is left in the device's [`Scopes`], because the device is in the same process.
//!
//! Every device is told, because a thread may use any of them next. The queue to a device is short, and stays full while another
//! thread waits for the device, perhaps for something that this thread has yet to do. So with several devices, a [`Messenger`] of each
//! sends the custom op, and a thread waits for it only for a while.
//!
//! (Burn gives each op the stream of its thread. A stream for each scope would tell devices as well, but on plain devices CubeCL
//! synchronizes different streams, and does not order an op that changes a tensor of another stream in place.)

use crate::{
    LayerSet,
    messenger::{Messenger, Sent},
    scope::Scope,
};
use burn::{backend::DispatchDevice, tensor::Device};
use burn_remote::CustomOpClient;
use burn_std::id::StreamId;
use std::{
    any::Any,
    collections::{HashMap, VecDeque},
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

/// Changes the scope of a stream, and waits until the devices are told.
fn change(stream: StreamId, to: Option<Arc<Scope>>) {
    let sent = program().change(stream, to);
    sent.into_iter().for_each(Sent::wait);
}

/// The open scopes of the program, and the devices that are told of them.
#[derive(Default)]
struct Program {
    /// The innermost scope of each stream that is in one.
    open: HashMap<StreamId, Arc<Scope>>,
    devices: Vec<Told>,
}

/// A device that is told of scopes.
struct Told {
    layers: Arc<LayerSet>,
    messenger: Messenger,
}

fn program() -> MutexGuard<'static, Program> {
    static PROGRAM: LazyLock<Mutex<Program>> = LazyLock::new(Mutex::default);
    PROGRAM.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Program {
    /// Returns what is on its way by messengers.
    fn change(&mut self, stream: StreamId, to: Option<Arc<Scope>>) -> Vec<Sent> {
        let alone = self.devices.len() == 1;
        let mut sent = Vec::new();
        for Told { layers, messenger } in &mut self.devices {
            let used = layers.scopes.announce(stream, to.clone());
            match alone && messenger.is_idle() {
                true => messenger.send(stream),
                false => sent.push(messenger.send_aside(stream, used)),
            }
        }
        match to {
            Some(scope) => self.open.insert(stream, scope),
            None => self.open.remove(&stream),
        };
        sent
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
    program.devices.push(Told { layers, messenger });
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
    of_streams: Mutex<HashMap<StreamId, OfStream>>,
}

#[derive(Default)]
struct OfStream {
    now: Option<Arc<Scope>>,
    /// Whether an op of the stream has run on the device.
    used: bool,
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
            ..OfStream::default()
        };
        let open = open
            .iter()
            .map(|(stream, scope)| (*stream, in_scope(scope)));
        let mut of_streams = self.of_streams();
        *of_streams = open.collect();
        self.any.store(!of_streams.is_empty(), Ordering::Release);
    }

    /// Leaves a change that is about to be sent. Returns whether the stream has used the device, as far as known.
    fn announce(&self, stream: StreamId, to: Option<Arc<Scope>>) -> bool {
        let mut of_streams = self.of_streams();
        let of_stream = of_streams.entry(stream).or_default();
        of_stream.announced.push_back(to);
        self.any.store(true, Ordering::Release);
        of_stream.used
    }

    /// A change of the calling thread's stream has arrived.
    pub(crate) fn change(&self) {
        if let Some(of_stream) = self.of_streams().get_mut(&StreamId::current()) {
            of_stream.now = of_stream.announced.pop_front().flatten();
        }
    }

    /// The scope that ops of the calling thread's stream are in now.
    pub(crate) fn now(&self) -> Option<Arc<Scope>> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        let mut of_streams = self.of_streams();
        let of_stream = of_streams.entry(StreamId::current()).or_default();
        of_stream.used = true;
        of_stream.now.clone()
    }
}
