//! The NCCL functions that communicators need, with their types in nccl.h.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use super::library::{Library, RawUniqueId, Status};

pub(in crate::nccl) type Comm = *mut c_void;
pub(in crate::nccl) type Stream = *mut c_void;
pub(in crate::nccl) type Buffer = *const c_void;
pub(in crate::nccl) type MutBuffer = *mut c_void;
pub(in crate::nccl) type DataType = c_int;
pub(in crate::nccl) type Operator = c_int;

/// `ncclSuccess`.
pub(in crate::nccl) const SUCCESS: Status = 0;

/// `ncclInProgress`: the call was accepted, and proceeds in the background.
pub(in crate::nccl) const IN_PROGRESS: Status = 7;

/// `NCCL_API_MAGIC`.
pub(in crate::nccl) const MAGIC: c_uint = 0xcafe_beef;

/// The `NCCL_VERSION_CODE` of the configuration below.
pub(in crate::nccl) const VERSION: c_uint = 21_400;

/// `ncclConfig_t` as it was in version 2.14, the first that has one. Newer versions look at `size` and
/// `version`, and use defaults for the fields that are missing.
#[repr(C)]
pub(in crate::nccl) struct Config {
    pub(in crate::nccl) size: usize,
    pub(in crate::nccl) magic: c_uint,
    pub(in crate::nccl) version: c_uint,
    pub(in crate::nccl) blocking: c_int,
}

/// The NCCL functions that communicators need.
#[derive(Clone, Copy)]
pub(in crate::nccl) struct Functions {
    pub(in crate::nccl) init:
        unsafe extern "C" fn(*mut Comm, c_int, RawUniqueId, c_int, *mut Config) -> Status,
    pub(in crate::nccl) error_string: unsafe extern "C" fn(Status) -> *const c_char,
    pub(in crate::nccl) state: unsafe extern "C" fn(Comm, *mut Status) -> Status,
    pub(in crate::nccl) last_error: unsafe extern "C" fn(Comm) -> *const c_char,
    pub(in crate::nccl) finalize: unsafe extern "C" fn(Comm) -> Status,
    pub(in crate::nccl) destroy: unsafe extern "C" fn(Comm) -> Status,
    pub(in crate::nccl) abort: unsafe extern "C" fn(Comm) -> Status,
    pub(in crate::nccl) group_start: unsafe extern "C" fn() -> Status,
    pub(in crate::nccl) group_end: unsafe extern "C" fn() -> Status,
    pub(in crate::nccl) all_reduce:
        unsafe extern "C" fn(Buffer, MutBuffer, usize, DataType, Operator, Comm, Stream) -> Status,
    pub(in crate::nccl) reduce: unsafe extern "C" fn(
        Buffer,
        MutBuffer,
        usize,
        DataType,
        Operator,
        c_int,
        Comm,
        Stream,
    ) -> Status,
    pub(in crate::nccl) broadcast:
        unsafe extern "C" fn(Buffer, MutBuffer, usize, DataType, c_int, Comm, Stream) -> Status,
    pub(in crate::nccl) all_gather:
        unsafe extern "C" fn(Buffer, MutBuffer, usize, DataType, Comm, Stream) -> Status,
    pub(in crate::nccl) reduce_scatter:
        unsafe extern "C" fn(Buffer, MutBuffer, usize, DataType, Operator, Comm, Stream) -> Status,
    pub(in crate::nccl) send:
        unsafe extern "C" fn(Buffer, usize, DataType, c_int, Comm, Stream) -> Status,
    pub(in crate::nccl) receive:
        unsafe extern "C" fn(MutBuffer, usize, DataType, c_int, Comm, Stream) -> Status,
}

impl Functions {
    /// Looks up the functions in a library, which is never unloaded.
    pub(in crate::nccl) fn of(library: &'static Library) -> Result<Self, String> {
        // SAFETY: the types are those of nccl.h. All functions exist in version 2.14, and none has changed
        // since. Enumerations are C ints, and are passed as such.
        unsafe {
            Ok(Self {
                init: library.symbol("ncclCommInitRankConfig")?,
                error_string: library.symbol("ncclGetErrorString")?,
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

    /// Turns a status into NCCL's error message, with its last warning, unless the call succeeded or is in progress.
    pub(super) fn check(&self, status: Status, comm: Comm) -> Result<(), String> {
        if status == SUCCESS || status == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: any number is accepted, and the communicator does not matter (the last error is the process's).
        // Both results are strings of the library: a literal, and one that stays until the next error.
        let (text, detail) = unsafe {
            (
                string((self.error_string)(status)),
                string((self.last_error)(comm)),
            )
        };
        Err(match detail.trim() {
            "" => text,
            detail => format!("{text} ({detail})"),
        })
    }
}

/// # Safety
///
/// The pointer is null, or points to a string that lives through the call.
unsafe fn string(text: *const c_char) -> String {
    match text.is_null() {
        true => String::new(),
        // SAFETY: by this function's own contract.
        false => unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{NcclError, nccl::found::nccl};

    #[test]
    fn the_real_library_has_them_all() {
        match nccl() {
            Ok(found) => {
                let functions = Functions::of(found.library()).unwrap();
                let text = |status| functions.check(status, std::ptr::null_mut());
                assert_eq!((text(SUCCESS), text(IN_PROGRESS)), (Ok(()), Ok(())));
                assert!(text(5).unwrap_err().contains("invalid usage"));
            }
            Err(error @ NcclError::NotFound { .. }) => {
                eprintln!("skipped: no NCCL library: {error}");
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// The layout of NCCL 2.14. C pads the struct to the alignment of its largest member.
    #[test]
    fn the_configuration_has_the_layout_of_its_version() {
        assert_eq!(size_of::<Config>(), 24);
        assert_eq!(std::mem::offset_of!(Config, blocking), 16);
    }
}
