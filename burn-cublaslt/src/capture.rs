//! What a graph that records a stream has to know about work that is not one of CubeCL's kernels.

use cubecl::server::BufferBinding;
use cubecl_server::stream::StreamCapture;

/// Makes the graph that is being recorded, if any, guard the memory of all buffers for as long as the graph lives. A replay uses
/// their addresses again, when nobody else holds buffers that were only lent to the recorded work, such as a workspace. CubeCL
/// does this for the arguments of its kernels, but not for those of other work.
pub(crate) fn touch<'a>(
    capture: &mut StreamCapture,
    buffers: impl IntoIterator<Item = &'a BufferBinding>,
) {
    for buffer in buffers {
        capture.touch(buffer.stream, buffer.memory.descriptor().location());
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use burn_cubecl::CubeDevice;
    use cubecl::{cpu::CpuDevice, server::DeviceCaptures};

    use super::*;

    /// The seal of a graph asks for these pages.
    #[test]
    fn a_graph_knows_the_memory_of_everything() {
        let client = CubeDevice::Cpu(CpuDevice).client();
        // Small and large buffers lie on different pages.
        let handles = [4, 1 << 12, 1 << 22].map(|size| client.create_from_slice(&vec![1; size]));
        client.read(handles.to_vec()).unwrap();
        let buffers = handles.map(|handle| handle.binding());
        let owner = buffers[0].stream;

        let mut capture = StreamCapture::new(&DeviceCaptures::default());
        capture.prepare(owner).unwrap();
        touch(&mut capture, &buffers);
        capture.begin().unwrap();
        assert_eq!(
            capture.take_touched(),
            [],
            "nothing is recorded before it begins"
        );
        touch(&mut capture, &buffers);
        touch(&mut capture, &buffers[..1]);
        capture.end(owner).unwrap();
        let touched = capture.take_touched();
        assert_eq!(touched.len(), buffers.len());
        for buffer in &buffers {
            let location = buffer.memory.descriptor().location();
            assert!(
                touched
                    .iter()
                    .any(|page| page.location == location && page.stream == buffer.stream)
            );
        }
    }
}
