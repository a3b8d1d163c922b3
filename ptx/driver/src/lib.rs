//! A CUDA driver without a GPU: programs that load `libcuda` run their kernels in the PTX emulator ([`ptx_machine`]), on host memory.
//!
//! Whatever leads to a kernel is the program's own: CubeCL's CUDA runtime, its compiler or NVRTC, layouts, streams, arguments and
//! grids. Everything runs when it is called, so streams need not wait for each other. Time, as events measure it, is a count of
//! instructions, whatever else the machine does. Of the GPUs that it can be, CubeCL's runtime was tried on `sm_90`.
//!
//! `PTX_DRIVER_GPU` picks the GPU (`sm_80`, `sm_89` or `sm_90`, the default), which has two processors and says to have 32 MiB. `PTX_DRIVER_LOG` names a
//! file to which the kernels that ran are appended. The library is NVRTC too: it keeps what the real one, at `PTX_DRIVER_NVRTC`, compiles in
//! the folder `PTX_DRIVER_KERNELS`. An error of a kernel is printed, and all later calls fail, as on a GPU.

mod cache;
mod ffi;
mod gpu;
mod model;
