//! What an installed cuDNN plans for a GPU that is not there. cuDNN 9.8 and newer takes the description of one.

use super::*;

/// An H200, in the words of cuDNN 9.28.
const H200: &str = r#"{
    "deviceName": "NVIDIA H200", "deviceVer": 900, "driverVer": 13000, "cudaDeviceId": 0, "pciDeviceId": 0, "isTccDriver": 0,
    "multiProcessorCount": 132, "smCountOrigin": 0, "maxCtasPerSM": 32, "maxThreadsPerSM": 2048, "maxRegistersPerSM": 65536,
    "maxThreadsPerBlock": 1024, "regsPerBlock": 65536, "warpSize": 32, "maxGridSize": [2147483647, 65535, 65535],
    "maxBlockSize": [1024, 1024, 64], "maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": 232448,
    "reservedSharedMemoryPerBlock": 1024, "oversizedSharedMemoryPerBlock": 0, "supportCoopLaunch": 1,
    "totalGlobalMem": 150754820096, "l2CacheSize": 62914560, "memoryBusWidth": 6144, "memClockRateKHz": 3201000,
    "smClockRateKHz": 1980000}"#;

fn described(functions: &'static Functions) -> Result<Target, String> {
    let device = Descriptor::new(functions, Kind::CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR)?;
    device.set_text(Name::CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, H200)?;
    Ok(Target::Described(device.finalized()?))
}

/// `x`, `w`, stride, padding.
type Sizes = ([usize; 4], [usize; 4], usize, usize);

/// All of a ResNet-50's but those by 1 x 1, with 256 images.
const RESNET: [Sizes; 8] = [
    ([256, 3, 224, 224], [64, 3, 7, 7], 2, 3),
    ([256, 64, 56, 56], [64, 64, 3, 3], 1, 1),
    ([256, 128, 56, 56], [128, 128, 3, 3], 2, 1),
    ([256, 128, 28, 28], [128, 128, 3, 3], 1, 1),
    ([256, 256, 28, 28], [256, 256, 3, 3], 2, 1),
    ([256, 256, 14, 14], [256, 256, 3, 3], 1, 1),
    ([256, 512, 14, 14], [512, 512, 3, 3], 2, 1),
    ([256, 512, 7, 7], [512, 512, 3, 3], 1, 1),
];

/// A convolution of each kind, with sizes that are no multiple of 8, groups, one for each channel, and padding on one side only.
fn others() -> [Convolution; 5] {
    let of = |x: &[usize], w: &[usize]| Convolution::new(Element::F16, x, w);
    [
        Convolution {
            stride: vec![2],
            padding: vec![(2, 0)],
            ..of(&[4, 80, 300], &[384, 80, 3])
        },
        Convolution {
            dilation: vec![2; 2],
            padding: vec![(0, 1), (2, 1)],
            ..of(&[2, 5, 17, 19], &[3, 5, 2, 3])
        },
        Convolution {
            padding: vec![(1, 1); 2],
            ..of(&[8, 64, 14, 14], &[64, 16, 3, 3])
        },
        Convolution {
            padding: vec![(3, 3); 2],
            ..of(&[8, 96, 28, 28], &[96, 1, 7, 7])
        },
        Convolution {
            padding: vec![(1, 1); 3],
            stride: vec![1, 2, 2],
            ..of(&[2, 32, 8, 16, 16], &[32, 32, 3, 3, 3])
        },
    ]
}

#[test]
fn an_h200_has_plans() {
    let functions = match Functions::get() {
        Ok(functions) => functions,
        Err(why) => return println!("SKIPPED: {why}"),
    };
    let target = match described(functions) {
        Ok(target) => target,
        Err(why) => return println!("SKIPPED: this cuDNN takes no such description: {why}"),
    };
    let resnet = RESNET.map(|(x, w, stride, padding)| Convolution {
        stride: vec![stride; 2],
        padding: vec![(padding, padding); 2],
        ..Convolution::new(Element::BF16, &x, &w)
    });
    for convolution in resnet.into_iter().chain(others()) {
        for wanted in Wanted::ALL {
            let convolution = Convolution {
                wanted,
                ..convolution.clone()
            };
            match Plan::new(functions, &target, &convolution.clone().lifted()) {
                Ok(plan) => println!("{convolution:?}: {} bytes", plan.workspace),
                Err(why) => panic!("{convolution:?}: {why}"),
            }
        }
    }
}
