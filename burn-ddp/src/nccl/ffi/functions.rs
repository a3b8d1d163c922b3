//! The functions of NCCL that communicators need, by their types in nccl.h.

use std::ffi::{c_char, c_int, c_uint, c_void};

use super::library::{Library, RawUniqueId, Status};

pub(super) type Comm = *mut c_void;
pub(super) type Stream = *mut c_void;
pub(super) type Buffer = *const c_void;
pub(super) type MutBuffer = *mut c_void;
pub(super) type DataType = c_int;
pub(super) type Operator = c_int;

/// `ncclConfig_t` as it was in version 2.14, the first that has one; newer versions go by `size` and
/// `version` and give the rest its default.
#[repr(C)]
pub(super) struct Config {
    pub(super) size: usize,
    pub(super) magic: c_uint,
    pub(super) version: c_uint,
    pub(super) blocking: c_int,
}

/// The functions that communicators need.
#[cfg_attr(
    not(feature = "nccl"),
    expect(dead_code, reason = "communicators call them")
)]
pub(super) struct Functions {
    pub(super) init:
        unsafe extern "C" fn(*mut Comm, c_int, RawUniqueId, c_int, *mut Config) -> Status,
    pub(super) state: unsafe extern "C" fn(Comm, *mut Status) -> Status,
    pub(super) last_error: unsafe extern "C" fn(Comm) -> *const c_char,
    pub(super) finalize: unsafe extern "C" fn(Comm) -> Status,
    pub(super) destroy: unsafe extern "C" fn(Comm) -> Status,
    pub(super) abort: unsafe extern "C" fn(Comm) -> Status,
    pub(super) group_start: unsafe extern "C" fn() -> Status,
    pub(super) group_end: unsafe extern "C" fn() -> Status,
    pub(super) all_reduce:
        unsafe extern "C" fn(Buffer, MutBuffer, usize, DataType, Operator, Comm, Stream) -> Status,
    pub(super) reduce: unsafe extern "C" fn(
        Buffer,
        MutBuffer,
        usize,
        DataType,
        Operator,
        c_int,
        Comm,
        Stream,
    ) -> Status,
    pub(super) broadcast:
        unsafe extern "C" fn(Buffer, MutBuffer, usize, DataType, c_int, Comm, Stream) -> Status,
    pub(super) all_gather:
        unsafe extern "C" fn(Buffer, MutBuffer, usize, DataType, Comm, Stream) -> Status,
    pub(super) reduce_scatter:
        unsafe extern "C" fn(Buffer, MutBuffer, usize, DataType, Operator, Comm, Stream) -> Status,
    pub(super) send: unsafe extern "C" fn(Buffer, usize, DataType, c_int, Comm, Stream) -> Status,
    pub(super) receive:
        unsafe extern "C" fn(MutBuffer, usize, DataType, c_int, Comm, Stream) -> Status,
}

impl Functions {
    pub(super) fn of(library: &Library) -> Result<Self, String> {
        // SAFETY: the types are those of nccl.h. All functions are in version 2.14, and none has changed
        // since. Enumerations are passed as C's int, which they are.
        unsafe {
            Ok(Self {
                init: library.symbol("ncclCommInitRankConfig")?,
                state: library.symbol("ncclCommGetAsyncError")?,
                last_error: library.symbol("ncclGetLastError")?,
                finalize: library.symbol("ncclCommFinalize")?,
                destroy: library.symbol("ncclCommDestroy")?,
                abort: library.symbol("ncclCommAbort")?,
                group_start: library.symbol("ncclGroupStart")?,
                group_end: library.symbol("ncclGroupEnd")?,
                all_reduce: library.symbol("ncclAllReduce")?,
                reduce: library.symbol("ncclReduce")?,
                broadcast: library.symbol("ncclBroadcast")?,
                all_gather: library.symbol("ncclAllGather")?,
                reduce_scatter: library.symbol("ncclReduceScatter")?,
                send: library.symbol("ncclSend")?,
                receive: library.symbol("ncclRecv")?,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{NcclError, nccl::found::nccl};

    #[test]
    fn the_real_library_has_them_all() {
        match nccl() {
            Ok(found) => drop(Functions::of(found.library()).unwrap()),
            Err(error @ NcclError::NotFound { .. }) => {
                eprintln!("skipped: no NCCL library: {error}");
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// That of NCCL 2.14: C pads it to the size of its largest member.
    #[test]
    fn the_configuration_has_the_layout_of_its_version() {
        assert_eq!(size_of::<Config>(), 24);
        assert_eq!(std::mem::offset_of!(Config, blocking), 16);
    }
}
