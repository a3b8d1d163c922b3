//! The kernels that some work launches on CubeCL's devices.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use cubecl::{
    config::{TypeNameFormatLevel, type_name_format},
    future::block_on,
    logging::{LaunchObservation, LaunchObserver, ProfileDuration, TimingMethod, TimingRequest},
};

/// The kernels that some work launched, by name. Kernels of all threads and devices of the process count, because Burn's
/// streams compute on threads of their own.
///
/// ```
/// use benches::Launches;
/// use burn::tensor::{Device, Tensor};
///
/// # #[cfg(feature = "cpu")] {
/// let x = Tensor::<1>::ones([4], &Device::cpu());
/// let launches = Launches::of(|| drop((x.clone() + 1.0).into_data()));
/// assert_eq!(launches.total().count, 1);
/// # }
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Launches(pub BTreeMap<String, Kernel>);

/// The launches of one kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Kernel {
    /// The number of launches.
    pub count: usize,
    /// Their total time, if the device measures it.
    pub time: Duration,
}

impl Launches {
    /// The launches of `work`, which must wait until everything is computed.
    pub fn of(work: impl FnOnce()) -> Self {
        let observer = Arc::new(Observer::default());
        let observation = LaunchObservation::new(observer.clone());
        work();
        drop(observation);
        let profiles = core::mem::take(&mut *observer.0.lock().expect("no observer panics"));
        let mut launches = Self::default();
        for (kernel, profile) in profiles {
            let name = type_name_format(kernel, TypeNameFormatLevel::Short);
            let kernel = launches.0.entry(name).or_default();
            match profile {
                None => kernel.count += 1,
                Some(profile) => {
                    let ticks = block_on(profile.resolve());
                    kernel.time += ticks.map_or(Duration::ZERO, |ticks| ticks.duration());
                }
            }
        }
        launches
    }

    /// The sum over all kernels.
    pub fn total(&self) -> Kernel {
        let mut total = Kernel::default();
        for kernel in self.0.values() {
            total.count += kernel.count;
            total.time += kernel.time;
        }
        total
    }
}

/// Launches (`None`) and times of launches, in the order in which they were reported.
#[derive(Default)]
struct Observer(Mutex<Vec<(&'static str, Option<ProfileDuration>)>>);

impl Observer {
    fn push(&self, kernel: &'static str, profile: Option<ProfileDuration>) {
        let mut launches = self.0.lock().expect("no observer panics");
        launches.push((kernel, profile));
    }
}

impl LaunchObserver for Observer {
    fn launched(&self, kernel: &'static str) {
        self.push(kernel, None);
    }

    fn timing(&self) -> TimingRequest {
        TimingRequest::Deferred
    }

    fn profiled(&self, kernel: &'static str, profile: ProfileDuration) {
        // Any other clock is the host's, which also counts more than the kernel.
        if profile.timing_method() == TimingMethod::Device {
            self.push(kernel, Some(profile));
        }
    }
}

#[cfg(all(test, feature = "cpu", feature = "fusion"))]
mod tests {
    use burn::tensor::{Device, Distribution, Tensor, activation::gelu};
    use burn_amp::{Autocast, Policy, full_precision, named};

    use super::*;

    /// Neither a region nor a name breaks up what is one kernel without it.
    #[test]
    fn regions_leave_fusion_alone() {
        let _alone = crate::LAUNCHES.lock();
        let device = Autocast::new(Policy::o0()).device(Device::cpu()).unwrap();
        let x = Tensor::<2>::random([64, 64], Distribution::Default, &device);
        let block = |x: Tensor<2>| gelu((x.clone() + 1.0) * x.exp());
        let launches = |run: &dyn Fn(Tensor<2>) -> Tensor<2>| {
            let read = || drop(run(x.clone()).into_data());
            // What is measured or compiled once is so now.
            read();
            Launches::of(read).total().count
        };
        let plain = launches(&block);
        assert_eq!(launches(&|x| full_precision(|| block(x))), plain);
        let twice = launches(&|x| block(block(x)));
        let in_names = |x| named("second", || block(named("first", || block(x))));
        assert_eq!(launches(&in_names), twice);
        assert!(twice <= 2 * plain);
    }
}
