/* Stands in for NVIDIA's management library where there is no GPU: two or more cards that are well, but for what
   LONGHALO_FAKE_NVML says, e.g. "gpus=4,throttle=0x40,ecc=2,remap=1,persistence=0,temperature=91,power=350,free=10,
   width=8,nvlink=17,p2p=0,init=9". Faults are of GPU 1. Only what doctor_nvml.cpp calls is here. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9, ILL = 1, LINKS = 18 };

typedef struct { unsigned long long total, free, used; } Memory;

static unsigned handles[16]; /* a device is the address of its place here */

static unsigned long setting(const char* name, unsigned long otherwise) {
  const char* all = getenv("LONGHALO_FAKE_NVML");
  const size_t length = strlen(name);
  for (const char* at = all; at != NULL && *at != '\0'; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
    if (strncmp(at, name, length) == 0 && at[length] == '=') return strtoul(at + length + 1, NULL, 0);
  return otherwise;
}

static unsigned index_of(const void* device) { return (unsigned)((const unsigned*)device - handles); }
static unsigned long of_ill(const void* device, const char* name, unsigned long otherwise) {
  return index_of(device) == ILL ? setting(name, otherwise) : otherwise;
}

int nvmlInit_v2(void) { return (int)setting("init", SUCCESS); }
int nvmlShutdown(void) { return SUCCESS; }
const char* nvmlErrorString(int code) { return code == DRIVER_NOT_LOADED ? "Driver Not Loaded" : "Unknown Error"; }
int nvmlSystemGetDriverVersion(char* version, unsigned length) {
  snprintf(version, length, "580.1");
  return SUCCESS;
}
int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = (unsigned)setting("gpus", 2);
  return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  if (index == setting("lost", 99)) return 15; /* NVML_ERROR_GPU_IS_LOST */
  *device = handles + index;
  return SUCCESS;
}
int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  unsigned index = 0;
  if (sscanf(uuid, "GPU-%u", &index) != 1 || index >= setting("gpus", 2)) return NOT_FOUND;
  return nvmlDeviceGetHandleByIndex_v2(index, device);
}
int nvmlDeviceGetIndex(void* device, unsigned* index) {
  *index = index_of(device);
  return SUCCESS;
}
int nvmlDeviceGetName(void* device, char* name, unsigned length) {
  (void)device;
  snprintf(name, length, "Imaginary H200");
  return SUCCESS;
}
int nvmlDeviceGetUUID(void* device, char* uuid, unsigned length) {
  snprintf(uuid, length, "GPU-%u", index_of(device));
  return SUCCESS;
}
int nvmlDeviceGetMemoryInfo(void* device, Memory* memory) {
  memory->total = 100ull << 30;
  memory->free = (unsigned long long)of_ill(device, "free", 99) << 30;
  memory->used = memory->total - memory->free;
  return SUCCESS;
}
int nvmlDeviceGetEccMode(void* device, unsigned* now, unsigned* later) {
  *now = *later = (unsigned)of_ill(device, "eccmode", 1);
  return SUCCESS;
}
int nvmlDeviceGetTotalEccErrors(void* device, int type, int counter, unsigned long long* count) {
  if (type == 0) *count = 5;                                           /* corrected */
  else if (counter == 0) *count = of_ill(device, "ecc", 0);            /* uncorrected, since the driver was loaded */
  else *count = of_ill(device, "ecc", 0) + of_ill(device, "oldecc", 0); /* ever */
  return SUCCESS;
}
int nvmlDeviceGetRemappedRows(void* device, unsigned* corrected, unsigned* uncorrected, unsigned* pending,
                              unsigned* failed) {
  *corrected = *uncorrected = 0;
  *pending = of_ill(device, "remap", 0) == 1;
  *failed = of_ill(device, "remap", 0) == 2;
  return SUCCESS;
}
/* The newer name of this is missing, as in older drivers. */
int nvmlDeviceGetCurrentClocksThrottleReasons(void* device, unsigned long long* reasons) {
  *reasons = of_ill(device, "throttle", 0x1); /* idle */
  return SUCCESS;
}
int nvmlDeviceGetTemperature(void* device, int sensor, unsigned* celsius) {
  if (sensor != 0) return NOT_SUPPORTED;
  *celsius = (unsigned)of_ill(device, "temperature", 40);
  return SUCCESS;
}
int nvmlDeviceGetTemperatureThreshold(void* device, int threshold, unsigned* celsius) {
  (void)device;
  if (threshold != 1) return NOT_SUPPORTED;
  *celsius = 90;
  return SUCCESS;
}
int nvmlDeviceGetPowerManagementLimit(void* device, unsigned* milliwatts) {
  *milliwatts = (unsigned)of_ill(device, "power", 700) * 1000;
  return SUCCESS;
}
int nvmlDeviceGetPowerManagementDefaultLimit(void* device, unsigned* milliwatts) {
  (void)device;
  *milliwatts = 700000;
  return SUCCESS;
}
int nvmlDeviceGetPersistenceMode(void* device, unsigned* mode) {
  *mode = (unsigned)of_ill(device, "persistence", 1);
  return SUCCESS;
}
int nvmlDeviceGetCurrPcieLinkWidth(void* device, unsigned* width) {
  *width = (unsigned)of_ill(device, "width", 16);
  return SUCCESS;
}
int nvmlDeviceGetMaxPcieLinkWidth(void* device, unsigned* width) {
  (void)device;
  *width = 16;
  return SUCCESS;
}
int nvmlDeviceGetMaxPcieLinkGeneration(void* device, unsigned* generation) {
  (void)device;
  *generation = 5;
  return SUCCESS;
}
int nvmlDeviceGetNvLinkState(void* device, unsigned link, unsigned* active) {
  if (link >= LINKS) return NOT_SUPPORTED;
  *active = link < of_ill(device, "nvlink", LINKS);
  return SUCCESS;
}
int nvmlDeviceGetTopologyCommonAncestor(void* first, void* second, int* level) {
  *level = index_of(first) / 2 == index_of(second) / 2 ? 10 : 50;
  return SUCCESS;
}
int nvmlDeviceGetP2PStatus(void* first, void* second, int index, int* status) {
  (void)first;
  (void)second;
  if (index == 2) *status = setting("nvlink", LINKS) > 0 ? 0 : 1;
  else *status = setting("p2p", 1) ? 0 : 1;
  return SUCCESS;
}
