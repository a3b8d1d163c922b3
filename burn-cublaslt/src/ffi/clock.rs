//! Times what a GPU does.

use cudarc::driver::{
    result::event,
    sys::{CUevent, CUevent_flags, CUstream},
};

use super::text;

/// How often each piece of work is timed.
const TIMES: usize = 3;

/// How long the GPU takes for each piece of work that is enqueued on a stream, at its fastest, in milliseconds. They take turns. Waits
/// for all.
///
/// # Safety
///
/// The stream must belong to the thread's current device.
pub(super) unsafe fn fastest<const N: usize>(
    stream: CUstream,
    work: [&dyn Fn() -> Result<(), String>; N],
) -> Result<[f32; N], String> {
    let start = Event::new()?;
    // SAFETY: the event is alive, and the stream valid by this function's contract.
    unsafe { event::record(start.0, stream) }.map_err(text)?;
    let mut events = vec![start];
    for at in 0..TIMES * N {
        work[at % N]()?;
        let end = Event::new()?;
        // SAFETY: as above.
        unsafe { event::record(end.0, stream) }.map_err(text)?;
        events.push(end);
    }
    // SAFETY: as above.
    unsafe { event::synchronize(events[TIMES * N].0) }.map_err(text)?;
    let mut found = [f32::INFINITY; N];
    for (at, between) in events.windows(2).enumerate() {
        // SAFETY: both are alive, and were recorded on one stream.
        let took = unsafe { event::elapsed(between[0].0, between[1].0) }.map_err(text)?;
        found[at % N] = found[at % N].min(took);
    }
    Ok(found)
}

struct Event(CUevent);

impl Event {
    fn new() -> Result<Self, String> {
        let event = event::create(CUevent_flags::CU_EVENT_DEFAULT);
        event.map(Self).map_err(text)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: it was created by this, and nothing uses it afterwards. An error cannot be handled here.
        let _ = unsafe { event::destroy(self.0) };
    }
}
