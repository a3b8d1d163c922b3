//! CubeCL's CPU runtime.

use burn::tensor::Device;
use std::{
    cell::RefCell,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// The runtime's device, for one test after the other: its threads wait for each other by looking again and again, so two tests at once
/// take several times as long. A test's thread has it until it ends, so the test's other threads must get it from there.
pub(crate) fn cpu() -> Device {
    static TURN: Mutex<()> = Mutex::new(());
    thread_local! {
        static MINE: RefCell<Option<MutexGuard<'static, ()>>> = const { RefCell::new(None) };
    }
    MINE.with_borrow_mut(|mine| {
        mine.get_or_insert_with(|| TURN.lock().unwrap_or_else(PoisonError::into_inner));
    });
    Device::cpu()
}
