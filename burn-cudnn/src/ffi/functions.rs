//! The functions of the installed library.

use std::{
    ffi::{CStr, c_char, c_void},
    sync::OnceLock,
};

use cudarc::{cudnn::sys, driver::sys::CUstream};

use super::text;

/// The oldest version that is used. Older ones have the same functions, and were not tried.
const OLDEST: usize = 90_000;

/// A `cudnnHandle_t`.
pub(super) type Handle = *mut c_void;

/// A `cudnnBackendDescriptor_t`.
pub(super) type Raw = *mut c_void;

/// What a call returns, a `cudnnStatus_t`: 0 if it succeeded. Newer versions have values that the bindings do not know.
type Status = i32;

/// The functions that are called, with the numbers of enums in place of these.
pub(super) struct Functions {
    pub(super) create: unsafe extern "C" fn(*mut Handle) -> Status,
    pub(super) destroy: unsafe extern "C" fn(Handle) -> Status,
    pub(super) set_stream: unsafe extern "C" fn(Handle, CUstream) -> Status,
    pub(super) create_descriptor: unsafe extern "C" fn(i32, *mut Raw) -> Status,
    pub(super) destroy_descriptor: unsafe extern "C" fn(Raw) -> Status,
    pub(super) set: unsafe extern "C" fn(Raw, i32, i32, i64, *const c_void) -> Status,
    pub(super) get: unsafe extern "C" fn(Raw, i32, i32, i64, *mut i64, *mut c_void) -> Status,
    pub(super) finalize: unsafe extern "C" fn(Raw) -> Status,
    pub(super) execute: unsafe extern "C" fn(Handle, Raw, Raw) -> Status,
    describe: unsafe extern "C" fn(Status) -> *const c_char,
}

impl Functions {
    /// Those of the library, which is loaded when it is first asked for them. If it cannot be, why.
    pub(super) fn get() -> Result<&'static Self, String> {
        static FUNCTIONS: OnceLock<Result<Functions, String>> = OnceLock::new();
        FUNCTIONS
            .get_or_init(Self::load)
            .as_ref()
            .map_err(Clone::clone)
    }

    fn load() -> Result<Self, String> {
        // SAFETY: looking for the library loads it, and its initializers touch nothing but its own data.
        if !unsafe { sys::is_culib_present() } {
            return Err("libcudnn was not found".into());
        }
        macro_rules! function {
            ($name:literal) => {{
                // SAFETY: the function is of the type of its field, an enum of C being a number of 32 bits. The library stays loaded.
                let found = unsafe { sys::culib().get(concat!($name, "\0").as_bytes()) };
                *found.map_err(text)?
            }};
        }
        let version: unsafe extern "C" fn() -> usize = function!("cudnnGetVersion");
        // SAFETY: it takes nothing, and returns a number.
        let version = unsafe { version() };
        if version < OLDEST {
            return Err(format!(
                "cuDNN {version} is older than {OLDEST}: install cuDNN 9"
            ));
        }
        Ok(Self {
            create: function!("cudnnCreate"),
            destroy: function!("cudnnDestroy"),
            set_stream: function!("cudnnSetStream"),
            create_descriptor: function!("cudnnBackendCreateDescriptor"),
            destroy_descriptor: function!("cudnnBackendDestroyDescriptor"),
            set: function!("cudnnBackendSetAttribute"),
            get: function!("cudnnBackendGetAttribute"),
            finalize: function!("cudnnBackendFinalize"),
            execute: function!("cudnnBackendExecute"),
            describe: function!("cudnnGetErrorString"),
        })
    }

    /// An error that says what was done, if a call failed.
    pub(super) fn check(&self, status: Status, what: &str) -> Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: for every status it returns a text of its own, which ends with 0 and stays.
        let text = unsafe { CStr::from_ptr((self.describe)(status)) };
        Err(format!("{what}: {}", text.to_string_lossy()))
    }
}
