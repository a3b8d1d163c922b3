//! Loads the NCCL library at run time.

use std::{
    error::Error,
    ffi::{CStr, c_char, c_int},
    path::Path,
};

/// The bytes by which `ncclCommInitRankConfig` identifies the communicator.
pub(in crate::nccl) type UniqueId = [u8; 128];

/// `ncclUniqueId`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(in crate::nccl) struct RawUniqueId(pub(in crate::nccl) UniqueId);

/// `ncclResult_t`: 0 is success.
pub(in crate::nccl) type Status = c_int;

/// The NCCL library. It is never unloaded, because it has threads of its own.
pub(in crate::nccl) struct Library {
    library: &'static libloading::Library,
    get_version: unsafe extern "C" fn(*mut c_int) -> Status,
    get_unique_id: unsafe extern "C" fn(*mut RawUniqueId) -> Status,
    get_error_string: unsafe extern "C" fn(Status) -> *const c_char,
}

impl Library {
    /// The library that cudarc loads. `None` if cudarc finds none.
    #[cfg(feature = "nccl")]
    pub(in crate::nccl) fn by_cudarc() -> Option<Result<Self, String>> {
        use cudarc::nccl::sys::{culib, is_culib_present};
        // SAFETY: loading runs the library's initializers. Those of NCCL only touch its own data.
        let library = unsafe { is_culib_present().then(|| culib()) };
        library.map(Self::of)
    }

    /// Loads the library from a path, or by a bare name from where the system's loader looks.
    ///
    /// Fails with the loader's message.
    pub(in crate::nccl) fn open(file: &Path) -> Result<Self, String> {
        // SAFETY: loading runs the library's initializers. Those of NCCL only touch its own data.
        let library = unsafe { libloading::Library::new(file) }.map_err(text)?;
        Self::of(Box::leak(Box::new(library)))
    }

    fn of(library: &'static libloading::Library) -> Result<Self, String> {
        // SAFETY: the types are those of nccl.h, which have not changed since version 2.0.
        unsafe {
            Ok(Self {
                get_version: symbol(library, "ncclGetVersion")?,
                get_unique_id: symbol(library, "ncclGetUniqueId")?,
                get_error_string: symbol(library, "ncclGetErrorString")?,
                library,
            })
        }
    }

    /// Calls `ncclGetVersion`. Needs no GPU.
    pub(in crate::nccl) fn version(&self) -> Result<u32, String> {
        let mut version = 0;
        // SAFETY: the pointer is to an int that lives through the call.
        self.check(unsafe { (self.get_version)(&mut version) })?;
        Ok(version as u32)
    }

    /// Calls `ncclGetUniqueId`, which creates a new identity for a communicator, with a socket in this process where its
    /// ranks will meet. Needs no GPU.
    pub(in crate::nccl) fn unique_id(&self) -> Result<UniqueId, String> {
        let mut id = RawUniqueId([0; 128]);
        // SAFETY: the pointer is to 128 bytes that live through the call.
        self.check(unsafe { (self.get_unique_id)(&mut id) })?;
        Ok(id.0)
    }

    /// Turns a status other than success into NCCL's error message.
    fn check(&self, status: Status) -> Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: any number is accepted, and the result is a string literal of the library.
        let text = unsafe {
            let text = (self.get_error_string)(status);
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        };
        Err(text.unwrap_or_else(|| format!("error {status}")))
    }

    /// A function of the library.
    ///
    /// # Safety
    ///
    /// `T` is the function's type.
    pub(super) unsafe fn symbol<T: Copy>(&self, name: &str) -> Result<T, String> {
        // SAFETY: by this function's own contract.
        unsafe { symbol(self.library, name) }
    }
}

/// # Safety
///
/// `T` is the type of the function of this name.
unsafe fn symbol<T: Copy>(library: &'static libloading::Library, name: &str) -> Result<T, String> {
    // SAFETY: by this function's own contract.
    let symbol = unsafe { library.get::<T>(name) };
    symbol.map(|symbol| *symbol).map_err(text)
}

/// The loader's message, which is the source of libloading's error.
fn text(error: libloading::Error) -> String {
    error
        .source()
        .map_or_else(|| error.to_string(), ToString::to_string)
}
