//! The driver as a program finds it: a library whose functions it calls by name, as `cuda.h` declares them.

use std::ffi::{CString, c_void};

use libloading::{Library, Symbol};

/// Adds a number to the words of rows, whose ends are gaps.
const ADD: &str = "
.version 8.0
.target sm_80
.address_size 64
.visible .entry add(.param .u64 words, .param .u32 number)
{
.reg .b32 %r<4>; .reg .b64 %rd<4>;
ld.param.u64 %rd0, [words];
ld.param.u32 %r0, [number];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd1, %r1, 4;
add.s64 %rd2, %rd0, %rd1;
ld.global.u32 %r2, [%rd2];
add.s32 %r3, %r2, %r0;
st.global.u32 [%rd2], %r3;
ret;
}";

const LAUNCH_FAILED: i32 = 719;

fn driver() -> Library {
    let program = std::env::current_exe().unwrap();
    let library = program.parent().unwrap().join("libptx_driver.so");
    // SAFETY: the library has no initializers.
    unsafe { Library::new(library) }.unwrap()
}

/// Calls a function of the driver, by its name and the types of its arguments, and returns its status.
macro_rules! call {
    ($driver:expr, $name:literal, $($argument:expr => $kind:ty),*) => {{
        // SAFETY: `cuda.h` declares it so, and the pointers are to variables of these types.
        unsafe {
            let function: Symbol<unsafe extern "C" fn($($kind),*) -> i32> = $driver.get($name).unwrap();
            function($($argument),*)
        }
    }};
}

/// `CUDA_MEMCPY2D`, from the host to the GPU.
#[repr(C)]
struct Copy2d {
    from: Side,
    to: Side,
    width: usize,
    height: usize,
}

#[repr(C)]
struct Side {
    x: usize,
    y: usize,
    kind: u32,
    host: *const c_void,
    device: u64,
    array: *const c_void,
    pitch: usize,
}

#[test]
fn a_program_runs_kernels_until_one_fails() {
    let driver = driver();
    assert_eq!(call!(driver, b"cuInit", 0 => u32), 0);
    let (mut major, mut memory) = (0, 0usize);
    assert_eq!(
        call!(driver, b"cuDeviceGetAttribute", &mut major => *mut i32, 75 => i32, 0 => i32),
        0
    );
    assert_eq!(
        call!(driver, b"cuDeviceTotalMem_v2", &mut memory => *mut usize, 0 => i32),
        0
    );
    assert!(major >= 8 && memory > 1 << 20, "{major}, {memory}");
    let (mut free, mut all) = (0usize, 0usize);
    let info = |free: &mut usize, all: &mut usize| call!(driver, b"cuMemGetInfo_v2", free => *mut usize, all => *mut usize);

    // Two rows of three words, four words apart.
    let mut words = 0u64;
    assert_eq!(
        call!(driver, b"cuMemAlloc_v2", &mut words => *mut u64, 32 => usize),
        0
    );
    assert_eq!(info(&mut free, &mut all), 0);
    assert_eq!((all, free), (memory, memory - 32));
    let mut none = 0u64;
    let too_much = call!(driver, b"cuMemAlloc_v2", &mut none => *mut u64, 1 << 31 => usize);
    assert_eq!(too_much, 2, "out of memory");
    let rows = [1u32, 2, 3, 4, 5, 6];
    let side = |kind, host: *const u32, device, pitch| Side {
        x: 0,
        y: 0,
        kind,
        host: host.cast(),
        device,
        array: std::ptr::null(),
        pitch,
    };
    let copy = Copy2d {
        from: side(1, rows.as_ptr(), 0, 12),
        to: side(2, std::ptr::null(), words, 16),
        width: 12,
        height: 2,
    };
    assert_eq!(
        call!(driver, b"cuMemcpy2DAsync_v2", &copy => *const Copy2d, 0 => u64),
        0
    );

    let (ptx, name) = (CString::new(ADD).unwrap(), CString::new("add").unwrap());
    let (mut module, mut function) = (0u64, 0u64);
    assert_eq!(
        call!(driver, b"cuModuleLoadData", &mut module => *mut u64, ptx.as_ptr() => *const i8),
        0
    );
    let other = call!(driver, b"cuModuleGetFunction", &mut function => *mut u64, module => u64, ptx.as_ptr() => *const i8);
    assert_eq!(other, 500, "not found");
    assert_eq!(
        call!(driver, b"cuModuleGetFunction", &mut function => *mut u64, module => u64, name.as_ptr() => *const i8),
        0
    );

    let (mut start, mut end) = (0u64, 0u64);
    for event in [&mut start, &mut end] {
        assert_eq!(
            call!(driver, b"cuEventCreate", event => *mut u64, 0 => u32),
            0
        );
    }
    let launch = |words: &u64, threads: u32| {
        let number = 10u32;
        let arguments: [*const c_void; 2] = [
            std::ptr::from_ref(words).cast(),
            std::ptr::from_ref(&number).cast(),
        ];
        call!(driver, b"cuLaunchKernel", function => u64, 1 => u32, 1 => u32, 1 => u32, threads => u32, 1 => u32, 1 => u32, 0 => u32,
            0 => u64, arguments.as_ptr() => *const *const c_void, std::ptr::null() => *const c_void)
    };
    call!(driver, b"cuEventRecord", start => u64, 0 => u64);
    assert_eq!(launch(&words, 7), 0);
    call!(driver, b"cuEventRecord", end => u64, 0 => u64);
    let mut milliseconds = 0f32;
    assert_eq!(
        call!(driver, b"cuEventElapsedTime_v2", &mut milliseconds => *mut f32, start => u64, end => u64),
        0
    );
    // A millisecond, and 7 threads of 9 instructions.
    assert_eq!(milliseconds, 1.063);
    let mut found = [0u32; 7];
    assert_eq!(
        call!(driver, b"cuMemcpyDtoH_v2", found.as_mut_ptr() => *mut u32, words => u64, 28 => usize),
        0
    );
    assert_eq!(
        [&found[..3], &found[4..]].concat(),
        [11, 12, 13, 14, 15, 16]
    );

    // Beyond the end, after which the GPU is lost, as NVIDIA's is.
    assert_eq!(launch(&words, 9), LAUNCH_FAILED);
    assert_eq!(
        call!(driver, b"cuStreamSynchronize", 0 => u64),
        LAUNCH_FAILED
    );
    assert_eq!(
        call!(driver, b"cuMemcpyDtoH_v2", found.as_mut_ptr() => *mut u32, words => u64, 28 => usize),
        LAUNCH_FAILED
    );
}
