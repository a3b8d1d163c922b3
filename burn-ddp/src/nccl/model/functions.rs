//! The functions that nccl.h declares.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    ffi::{CString, c_char, c_int},
    ptr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use super::{
    CUDA_ERROR, Clique, INVALID_ARGUMENT, INVALID_USAGE, Member, Trouble,
    calls::{Made, size},
    device::{current, device_of, put},
};
use crate::nccl::{
    ffi::{
        Buffer, Comm, Config, DataType, Functions, IN_PROGRESS, MAGIC, MutBuffer, Operator,
        RawUniqueId, SUCCESS, Status, Stream, UniqueId, VERSION,
    },
    plan::{Kind, Move},
};

pub(super) fn functions() -> Functions {
    Functions {
        init,
        error_string,
        state,
        last_error,
        finalize,
        destroy,
        abort,
        group_start,
        group_end,
        all_reduce,
        reduce,
        broadcast,
        all_gather,
        reduce_scatter,
        send,
        receive,
    }
}

static CLIQUES: Mutex<Option<HashMap<UniqueId, Arc<Clique>>>> = Mutex::new(None);
static MEMBERS: Mutex<Option<HashMap<usize, Arc<Member>>>> = Mutex::new(None);

/// The communicators of an identity.
pub(super) fn clique(id: UniqueId) -> Arc<Clique> {
    let mut cliques = CLIQUES.lock().unwrap();
    cliques
        .get_or_insert_default()
        .entry(id)
        .or_default()
        .clone()
}

fn member(comm: Comm) -> Option<Arc<Member>> {
    let members = MEMBERS.lock().unwrap();
    members.as_ref()?.get(&(comm as usize)).cloned()
}

/// The communicator's member, if it can be used now.
fn ready(comm: Comm) -> Result<Arc<Member>, Status> {
    let member = member(comm).ok_or(INVALID_ARGUMENT)?;
    match member.state.load(Ordering::Acquire) {
        SUCCESS => Ok(member),
        IN_PROGRESS => {
            let text =
                "Attempt to use communicator before the previous operation returned ncclSuccess";
            *member.problem.lock().unwrap() = text.into();
            Err(INVALID_ARGUMENT)
        }
        status => Err(status),
    }
}

/// Runs `job` later on a thread. The communicator is in progress until then.
fn later(member: &Arc<Member>, job: impl FnOnce(&Arc<Member>) + Send + 'static) -> Status {
    member.state.store(IN_PROGRESS, Ordering::Release);
    let member = member.clone();
    thread::spawn(move || {
        thread::sleep(Duration::from_millis(1));
        job(&member);
        let (from, to) = (IN_PROGRESS, SUCCESS);
        let _ = member
            .state
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire);
    });
    IN_PROGRESS
}

unsafe extern "C" fn init(
    place: *mut Comm,
    ranks: c_int,
    RawUniqueId(id): RawUniqueId,
    rank: c_int,
    config: *mut Config,
) -> Status {
    // SAFETY: the pointer is to a configuration that lives through the call.
    let config = unsafe { &*config };
    let valid = config.size >= 20 && config.magic == MAGIC && config.version == VERSION;
    if !valid || config.blocking != 0 || !(0..ranks).contains(&rank) {
        return INVALID_ARGUMENT;
    }
    let Some(device) = current() else {
        return CUDA_ERROR;
    };
    let (clique, rank, ranks) = (clique(id), rank as usize, ranks as usize);
    {
        let mut meeting = clique.meeting();
        meeting.size = ranks;
        meeting.devices.insert(rank, device);
        meeting.alive.insert(rank);
        clique.changed.notify_all();
    }
    let member = Arc::new(Member {
        clique,
        rank,
        device,
        state: AtomicI32::new(IN_PROGRESS),
        problem: Mutex::default(),
        aborted: AtomicBool::new(false),
        finalized: AtomicBool::new(false),
        calls: AtomicUsize::new(0),
        joining: Mutex::new(None),
    });
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut members = MEMBERS.lock().unwrap();
    members
        .get_or_insert_default()
        .insert(number, member.clone());
    // SAFETY: the pointer is to a place for a communicator.
    unsafe { *place = number as Comm };
    let (joining, place) = (member.clone(), place as usize);
    let thread = thread::spawn(move || {
        let met = joining.wait(|meeting| {
            let there = meeting.devices.len() == ranks;
            there.then(|| meeting.devices.clone())
        });
        let Ok(devices) = met else { return };
        // SAFETY: like versions before 2.18, this reads the communicator where it was put, until it has met its peers. Callers
        // keep it there that long.
        let there = unsafe { (place as *const Comm).read() };
        let shared = |device: &usize| devices.values().filter(|it| *it == device).count() > 1;
        if there as usize != number {
            joining.fail(CUDA_ERROR, "the communicator was moved".into());
        } else if shared(&device) {
            joining.fail(
                INVALID_USAGE,
                format!("Duplicate GPU detected on CUDA device {device}"),
            );
        } else if devices.values().any(shared) {
            // Other ranks share a GPU and gave up. This rank never learns of it.
            let _ = joining.wait(|_| None::<()>);
        } else {
            joining.state.store(SUCCESS, Ordering::Release);
        }
    });
    *member.joining.lock().unwrap() = Some(thread);
    IN_PROGRESS
}

unsafe extern "C" fn error_string(status: Status) -> *const c_char {
    let text = match status {
        CUDA_ERROR => c"unhandled cuda error",
        INVALID_ARGUMENT => c"invalid argument",
        INVALID_USAGE => c"invalid usage",
        _ => c"remote process exited or there was a network error",
    };
    text.as_ptr()
}

unsafe extern "C" fn last_error(comm: Comm) -> *const c_char {
    let problem = member(comm).map(|member| member.problem.lock().unwrap().clone());
    // Leaked, because it may be read at any time.
    CString::new(problem.unwrap_or_default())
        .unwrap()
        .into_raw()
}

unsafe extern "C" fn state(comm: Comm, into: *mut Status) -> Status {
    let Some(member) = member(comm) else {
        return INVALID_ARGUMENT;
    };
    // SAFETY: the pointer is to an int that lives through the call.
    unsafe { *into = member.state.load(Ordering::Acquire) };
    SUCCESS
}

unsafe extern "C" fn finalize(comm: Comm) -> Status {
    match ready(comm) {
        Ok(member) if member.finalized.swap(true, Ordering::AcqRel) => INVALID_ARGUMENT,
        Ok(member) => later(&member, |_| ()),
        Err(status) => status,
    }
}

/// Removes a communicator.
fn end(comm: Comm, member: &Member, aborts: bool) -> Status {
    MEMBERS
        .lock()
        .unwrap()
        .get_or_insert_default()
        .remove(&(comm as usize));
    let mut meeting = member.clique.meeting();
    meeting.alive.remove(&member.rank);
    if aborts {
        meeting.aborted.push(member.rank);
        member.aborted.store(true, Ordering::Release);
    }
    member.clique.changed.notify_all();
    SUCCESS
}

unsafe extern "C" fn destroy(comm: Comm) -> Status {
    match ready(comm) {
        Ok(member) if member.finalized.load(Ordering::Acquire) => end(comm, &member, false),
        // NCCL would wait for the peers here.
        Ok(_) => INVALID_USAGE,
        Err(status) => status,
    }
}

unsafe extern "C" fn abort(comm: Comm) -> Status {
    let Some(member) = member(comm) else {
        return INVALID_ARGUMENT;
    };
    let status = end(comm, &member, true);
    if let Some(thread) = member.joining.lock().unwrap().take() {
        thread.join().unwrap();
    }
    status
}

thread_local! {
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    static GROUP: RefCell<Vec<(Arc<Member>, usize, Made)>> = const { RefCell::new(Vec::new()) };
    static REFUSED: Cell<Status> = const { Cell::new(SUCCESS) };
}

unsafe extern "C" fn group_start() -> Status {
    DEPTH.set(DEPTH.get() + 1);
    SUCCESS
}

unsafe extern "C" fn group_end() -> Status {
    DEPTH.set(DEPTH.get() - 1);
    let group = GROUP.take();
    let refused = REFUSED.replace(SUCCESS);
    if refused != SUCCESS {
        return refused;
    }
    let Some((member, stream, _)) = group.first() else {
        return SUCCESS;
    };
    let (member, stream) = (member.clone(), *stream);
    let calls: Vec<Made> = group.into_iter().map(|(.., made)| made).collect();
    later(&member, move |member| {
        member.clique.meeting().launches += 1;
        let on_stream = member.clone();
        if let Err(problem) = put(stream, Box::new(move || on_stream.make(&calls))) {
            member.fail(CUDA_ERROR, problem);
        }
    })
}

/// Notes a call, unless one of its `buffers` is on another device.
fn note(comm: Comm, stream: Stream, dtype: DataType, call: Move, buffers: &[u64]) -> Status {
    let noted = ready(comm).and_then(|member| {
        let meeting = member.clique.meeting();
        if meeting.troubles.get(&member.rank) == Some(&Trouble::Refuses) {
            return Err(INVALID_USAGE);
        }
        let here = |address: &u64| device_of(*address) == Some(member.device);
        let known = size(dtype).is_some() && (0..5).contains(&call.op) && call.peer < meeting.size;
        drop(meeting);
        match known && buffers.iter().all(here) && DEPTH.get() == 1 {
            true => Ok(member),
            false => Err(INVALID_ARGUMENT),
        }
    });
    match noted {
        Ok(member) => {
            let made = Made { call, dtype };
            GROUP.with_borrow_mut(|group| group.push((member, stream as usize, made)));
            SUCCESS
        }
        Err(status) => {
            REFUSED.set(status);
            status
        }
    }
}

/// A call, of which `peer` is the root or the other rank of a message.
fn call(
    kind: Kind,
    from: Buffer,
    into: MutBuffer,
    count: usize,
    op: Operator,
    peer: c_int,
) -> Move {
    Move {
        kind,
        from: from as u64,
        into: into as u64,
        count,
        op,
        peer: peer as usize,
    }
}

unsafe extern "C" fn all_reduce(
    from: Buffer,
    into: MutBuffer,
    count: usize,
    dtype: DataType,
    op: Operator,
    comm: Comm,
    stream: Stream,
) -> Status {
    let call = call(Kind::AllReduce, from, into, count, op, 0);
    note(comm, stream, dtype, call, &[call.from, call.into])
}

unsafe extern "C" fn reduce(
    from: Buffer,
    into: MutBuffer,
    count: usize,
    dtype: DataType,
    op: Operator,
    root: c_int,
    comm: Comm,
    stream: Stream,
) -> Status {
    let call = call(Kind::Reduce, from, into, count, op, root);
    let is_root = member(comm).is_some_and(|member| member.rank == call.peer);
    let into = if is_root { call.into } else { call.from };
    note(comm, stream, dtype, call, &[call.from, into])
}

unsafe extern "C" fn broadcast(
    from: Buffer,
    into: MutBuffer,
    count: usize,
    dtype: DataType,
    root: c_int,
    comm: Comm,
    stream: Stream,
) -> Status {
    let call = call(Kind::Broadcast, from, into, count, 0, root);
    note(comm, stream, dtype, call, &[call.from, call.into])
}

unsafe extern "C" fn all_gather(
    from: Buffer,
    into: MutBuffer,
    count: usize,
    dtype: DataType,
    comm: Comm,
    stream: Stream,
) -> Status {
    let call = call(Kind::AllGather, from, into, count, 0, 0);
    note(comm, stream, dtype, call, &[call.from, call.into])
}

unsafe extern "C" fn reduce_scatter(
    from: Buffer,
    into: MutBuffer,
    count: usize,
    dtype: DataType,
    op: Operator,
    comm: Comm,
    stream: Stream,
) -> Status {
    let call = call(Kind::ReduceScatter, from, into, count, op, 0);
    note(comm, stream, dtype, call, &[call.from, call.into])
}

unsafe extern "C" fn send(
    from: Buffer,
    count: usize,
    dtype: DataType,
    peer: c_int,
    comm: Comm,
    stream: Stream,
) -> Status {
    let call = call(Kind::Send, from, ptr::null_mut(), count, 0, peer);
    note(comm, stream, dtype, call, &[call.from])
}

unsafe extern "C" fn receive(
    into: MutBuffer,
    count: usize,
    dtype: DataType,
    peer: c_int,
    comm: Comm,
    stream: Stream,
) -> Status {
    let call = call(Kind::Receive, ptr::null(), into, count, 0, peer);
    note(comm, stream, dtype, call, &[call.into])
}
