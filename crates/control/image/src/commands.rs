//! The commands of `forkd-image`.

use std::io::Read;
use std::path::{Path, PathBuf};

use forkd_formats::image_cli::{
    Answer, ImageInstalled, ImageMade, InitramfsMade, KernelMade, MachineMade,
};
use forkd_image::cache::Cache;
use forkd_image::debian::bootstrap::DebianRoot;
use forkd_image::debian::mirror::{Mirror, MirrorChoice};
use forkd_image::error::Error;
use forkd_image::image::Image;
use forkd_image::initramfs::Flavour;
use forkd_image::kernel::Kernel;
use forkd_image::progress::Progress;
use forkd_image::recipe::{Base, Recipe};
use forkd_image::root::oci::OciRoot;
use forkd_image::{export, image, initramfs, kernel, machine};
use forkd_oci::Means;
use forkd_oci::auth::{self, Credential, Helpers, Secret};
use forkd_oci::manifest::Platform;
use forkd_oci::registries::Registries;
use forkd_oci::registry::RegistryError;
use forkd_oci::source::{Source, SourceError};
use forkd_types::MiB;
use serde::Serialize;
use serde_json::{Value, json};

use crate::args::{
    Args, BuildArgs, Command, FlavourArg, InitramfsArgs, InstallArgs, KernelArgs, MachineArgs,
    OwnKernel, RegistryArgs, What,
};
use crate::fetch;

/// Size of the disk of a container image, unless another is asked for.
const DISK_MIB: u32 = 8192;
const MAX_PASSWORD: u64 = 64 << 10;

struct Context<'a> {
    args: &'a Args,
    cache: Cache,
    mirror: MirrorChoice,
    progress: Progress,
}

/// The result of a command: one path for people, or JSON for programs.
struct Output {
    path: PathBuf,
    json: Value,
}

impl Output {
    fn new(path: PathBuf, made: impl Serialize) -> Self {
        let json = json!(Answer::new(made));
        Self { path, json }
    }
}

/// Runs the command that was typed.
pub fn run(args: &Args) -> Result<(), Error> {
    let context = Context {
        args,
        cache: Cache::of_user()?,
        mirror: match &args.mirror {
            Some(text) => MirrorChoice::Given(Mirror::given(text)?),
            None => MirrorChoice::Host,
        },
        progress: if args.quiet {
            Progress::silent()
        } else {
            Progress::stderr()
        },
    };
    let output = match &args.command {
        Command::Kernel(args) => context.kernel(args)?,
        Command::Initramfs(args) => context.initramfs(args)?,
        Command::Build(args) => context.build(args)?,
        Command::Install(args) => context.install(args)?,
        Command::Machine(args) => context.machine(args)?,
        // `main` takes it before: it has no cache and another form of output.
        Command::Fetch(_) => return Ok(()),
    };
    if args.json {
        println!("{:#}", output.json);
    } else {
        println!("{}", output.path.display());
    }
    Ok(())
}

impl Context<'_> {
    fn debian_kernel(&self) -> Result<Kernel, Error> {
        let refresh = self.args.refresh;
        let kernel = kernel::debian(&self.cache, &self.mirror, refresh, &self.progress)?;
        Ok(kernel)
    }

    fn any_kernel(&self, own: &OwnKernel) -> Result<Kernel, Error> {
        match &own.kernel {
            Some(file) => {
                let modules = own.modules.as_deref();
                Ok(kernel::own(&self.cache, file, modules, &self.progress)?)
            }
            None => self.debian_kernel(),
        }
    }

    fn kernel(&self, args: &KernelArgs) -> Result<Output, Error> {
        let kernel = self.any_kernel(&args.own)?;
        let folder = exported(&kernel.folder, args.out.as_deref())?;
        let path_of = |name: &str| {
            let path = folder.join(name);
            path.exists().then_some(path)
        };
        let made = KernelMade {
            folder: folder.clone(),
            version: kernel.record.version.clone(),
            pvh: kernel.record.pvh_entry.is_some(),
            vmlinux: folder.join("vmlinux"),
            vmlinuz: path_of("vmlinuz"),
            config: path_of("config"),
            modules: path_of("modules"),
            record: path_of("kernel.json"),
        };
        Ok(Output::new(folder, made))
    }

    fn initramfs(&self, args: &InitramfsArgs) -> Result<Output, Error> {
        let agent = agent(args.agent.as_deref())?;
        let kernel = match &args.kernel_dir {
            Some(folder) => Kernel::open(folder)?,
            None => self.debian_kernel()?,
        };
        let flavour = match args.flavour {
            FlavourArg::Guest => Flavour::Guest,
            FlavourArg::Machine => Flavour::Machine,
        };
        let made = initramfs::build(&self.cache, &kernel, &agent, flavour, &self.progress)?;
        let path = exported(&made, args.out.as_deref())?;
        let made = InitramfsMade {
            initramfs: path.clone(),
            flavour: flavour.name().to_owned(),
            kernel_version: kernel.record.version.clone(),
            agent,
        };
        Ok(Output::new(path, made))
    }

    /// Builds the image of a recipe, or of a container image.
    fn image(&self, what: &What) -> Result<Image, Error> {
        // A folder of a recipe reads like the name of an image.
        if Path::new(&what.recipe).exists() {
            return self.recipe_image(what);
        }
        match what.recipe.parse::<Source>() {
            Ok(source) => self.container_image(&source, what),
            Err(SourceError::NoKind { .. }) => self.recipe_image(what),
            Err(error) => Err(error.into()),
        }
    }

    fn container_image(&self, source: &Source, what: &What) -> Result<Image, Error> {
        let name = what.name.clone().unwrap_or_else(|| source.short_name());
        let name = name
            .parse()
            .map_err(|source| Error::Name { name, source })?;
        let found = self.find(source, &what.registry)?;
        let disk = MiB(what.disk_mib.unwrap_or(DISK_MIB));
        let recipe = Recipe::of_image(name, found.name(), disk);
        let refresh = self.args.refresh;
        Ok(image::build(
            &self.cache,
            &recipe,
            &found,
            refresh,
            &self.progress,
        )?)
    }

    /// Finds a container image, and fetches it if it is in a registry.
    fn find(&self, source: &Source, args: &RegistryArgs) -> Result<OciRoot, Error> {
        let mut registries =
            Registries::read(args.registries.as_deref()).map_err(RegistryError::from)?;
        if let Some(default) = &args.registry {
            registries
                .set_default(default)
                .map_err(RegistryError::from)?;
        }
        let own = registries.auth_file().map(Path::to_owned);
        let auth_files = match &args.auth_file {
            Some(file) => vec![file.clone()],
            None => own.into_iter().chain(auth::files_of_user()).collect(),
        };
        let host = Platform::host();
        let mut seen = fetch::Shown::default();
        let means = Means {
            platform: args.platform.as_ref().unwrap_or(&host),
            registries: &registries,
            credential: credential(args)?,
            auth_files,
            helpers: Helpers::Run,
            blobs: self.cache.root().join("oci/blobs"),
            spool: self.cache.root().join("oci/spool"),
            told: &mut |progress| {
                if let Some(line) = seen.line(progress) {
                    self.progress.note(&line);
                }
            },
        };
        Ok(OciRoot::open(source, means)?)
    }

    fn recipe_image(&self, what: &What) -> Result<Image, Error> {
        if what.name.is_some() || what.disk_mib.is_some() {
            return Err(Error::OnlyForContainers);
        }
        let recipe = Recipe::find(&what.recipe)?;
        let refresh = self.args.refresh;
        let (suite, variant) = match &recipe.base {
            Base::Debian { suite, variant } => (suite, *variant),
            Base::Oci { oci } => {
                let source = self.find(&oci.parse()?, &what.registry)?;
                let (cache, progress) = (&self.cache, &self.progress);
                return Ok(image::build(cache, &recipe, &source, refresh, progress)?);
            }
        };
        let source = DebianRoot {
            recipe: &recipe,
            suite,
            variant,
            cache: &self.cache,
            mirror: &self.mirror,
            kernel: None,
            refresh,
        };
        Ok(image::build(
            &self.cache,
            &recipe,
            &source,
            refresh,
            &self.progress,
        )?)
    }

    fn build(&self, args: &BuildArgs) -> Result<Output, Error> {
        let image = self.image(&args.what)?;
        let beside = args.out.as_ref().map(|out| out.with_extension("json"));
        let disk = exported(&image.disk(), args.out.as_deref())?;
        let record = exported(&image.folder.join(image::RECORD), beside.as_deref())?;
        let made = ImageMade {
            disk: disk.clone(),
            record,
            packages: image.record.packages.len(),
            digest: image.record.disk.digest,
            name: image.record.name,
        };
        Ok(Output::new(disk, made))
    }

    fn install(&self, args: &InstallArgs) -> Result<Output, Error> {
        let kernel = self.debian_kernel()?;
        let agent = agent(None)?;
        let initramfs =
            initramfs::build(&self.cache, &kernel, &agent, Flavour::Guest, &self.progress)?;
        let image = self.image(&args.what)?;
        let kernels = args.data_dir.join("kernels");
        let folder = args.data_dir.join("images").join(&image.record.name);
        export::copy(&kernel.folder.join("vmlinux"), &kernels.join("vmlinux"))?;
        export::copy(&initramfs, &kernels.join("initramfs.cpio"))?;
        export::copy(&image.disk(), &folder.join(image::DISK))?;
        // Last: an image counts as installed when its record is there.
        export::copy(
            &image.folder.join(image::RECORD),
            &folder.join(image::RECORD),
        )?;
        let made = ImageInstalled {
            image: folder.clone(),
            kernel: kernels.join("vmlinux"),
            initramfs: kernels.join("initramfs.cpio"),
            name: image.record.name,
        };
        Ok(Output::new(folder, made))
    }

    fn machine(&self, args: &MachineArgs) -> Result<Output, Error> {
        let agent = agent(args.agent.as_deref())?;
        let kernel = self.any_kernel(&args.own)?;
        let machine = machine::build(
            &self.cache,
            &kernel,
            &agent,
            &self.mirror,
            self.args.refresh,
            &self.progress,
        )?;
        let folder = exported(&machine.folder, args.out.as_deref())?;
        let made = MachineMade {
            kernel_version: machine.record.kernel,
            vmlinuz: folder.join("vmlinuz"),
            initramfs: folder.join("initramfs.cpio"),
            root: folder.join(image::DISK),
            record: folder.join(image::RECORD),
            folder: folder.clone(),
        };
        Ok(Output::new(folder, made))
    }
}

/// The credential of the arguments. The password is in a file, or on standard input: arguments can be seen by others.
fn credential(args: &RegistryArgs) -> Result<Option<Credential>, Error> {
    let (Some(username), Some(path)) = (&args.username, &args.password_file) else {
        return Ok(None);
    };
    let failed = |source| Error::Password {
        path: path.clone(),
        source,
    };
    let password = if path == Path::new("-") {
        std::io::read_to_string(std::io::stdin().lock().take(MAX_PASSWORD)).map_err(failed)?
    } else {
        let file = std::fs::File::open(path).map_err(failed)?;
        std::io::read_to_string(file.take(MAX_PASSWORD)).map_err(failed)?
    };
    Ok(Some(Credential::Password {
        username: username.clone(),
        password: Secret::new(password.trim_end_matches(['\r', '\n']).to_owned()),
    }))
}

/// The path of a result: the copy if one was requested, otherwise the original in the cache.
fn exported(made: &Path, out: Option<&Path>) -> Result<PathBuf, Error> {
    match out {
        Some(out) => {
            export::copy(made, out)?;
            Ok(out.to_owned())
        }
        None => Ok(made.to_owned()),
    }
}

/// The given agent, or the one beside this program.
fn agent(given: Option<&Path>) -> Result<PathBuf, Error> {
    if let Some(path) = given {
        return Ok(path.to_owned());
    }
    let path = std::env::current_exe()
        .ok()
        .and_then(|program| Some(program.parent()?.join("forkd-agent")))
        .unwrap_or_else(|| "forkd-agent".into());
    if path.is_file() {
        Ok(path)
    } else {
        Err(Error::NoAgent { path })
    }
}
